"""Copies between a slab and a store: whole and checked, or told of; on threads that outlive no close."""

import itertools
import threading
from contextlib import contextmanager

import pytest
import xxhash

from layercast.errors import DeadlineExceeded
from layercast.flow.orders import KeyedSlots, TierOrder
from layercast.flow.tier import Tier
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.store.folder import FolderStore
from layercast.store.slab import Slab
from layercast.testing.oracle import ByteEngine

SPECS = [GroupSpec("full", GroupKind.FULL, 4, (0, 1)), GroupSpec("state", GroupKind.RECURRENT, 8, (2, 3, 4))]
KEYS = tuple(bytes([number]) * 32 for number in range(8))


class Stuck(FolderStore):
    """Answers nothing until it is told to."""

    def __init__(self, folder, capacity):
        super().__init__(folder, capacity)
        self.let = threading.Event()

    def present(self, keys):
        self.let.wait(30)
        return super().present(keys)


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path, 1 << 20)


@contextmanager
def tier_over(store, verify=True):
    """A slab of oracle bytes, digests taken, and its tier; at rest afterwards."""
    threads = threading.active_count()
    slab = Slab.create(ByteEngine(SPECS, 4).layout, 1 << 16)
    for group, owner in enumerate(slab.layout.groups):
        for slot in range(4):
            for row, layer in enumerate(owner.layers):
                data = bytes((group * 91 + slot * 17 + layer * 5 + at) % 251 for at in range(owner.layer_bytes(layer)))
                slab.write(group, slot, layer, data)
                slab.digests[group][row, slot] = xxhash.xxh3_64_intdigest(data)
    tier = Tier(slab, store, 10.0, verify)
    yield tier, slab
    tier.close(5)
    slab.close()
    assert threading.active_count() == threads


def copied(tier, fetch, *blocks):
    """The outcome of one order for (group, keys, slots)."""
    tier.begin(TierOrder("order", fetch, tuple(KeyedSlots(*block) for block in blocks)))
    tier.wait(5)
    (outcome,) = tier.ended()
    assert tier.idle
    return outcome


def content(slab, group, slot):
    return [slab.read(group, slot, layer) for layer in slab.layout.groups[group].layers]


def test_what_went_down_comes_up_in_other_slots_with_its_digests(store):
    with tier_over(store) as (tier, slab):
        down = copied(tier, False, (0, KEYS[:2], (3, 1)), (1, KEYS[2:3], (0,)))
        up = copied(tier, True, (0, KEYS[:2], (0, 2)), (1, KEYS[2:3], (3,)))
        assert down.done
        assert up.done
        assert down.nbytes == up.nbytes == sum((2, 1)[g] * slab.layout.groups[g].block_bytes for g in (0, 1))
        for group, source, target in ((0, 3, 0), (0, 1, 2), (1, 0, 3)):
            assert content(slab, group, source) == content(slab, group, target)
            assert (slab.digests[group][:, source] == slab.digests[group][:, target]).all()


def test_what_is_there_is_not_written_again(store):
    with tier_over(store) as (tier, _):
        copied(tier, False, (0, KEYS[:1], (0,)))
        files = {path: path.stat().st_mtime_ns for path in store.folder.rglob("*")}
        again = copied(tier, False, (0, KEYS[:1], (1,)))
        assert (again.done, again.nbytes) == (True, 0)
        assert {path: path.stat().st_mtime_ns for path in store.folder.rglob("*")} == files


@pytest.mark.parametrize("verify", [True, False])
def test_a_slot_that_is_not_what_was_saved_does_not_go_down(store, verify):
    with tier_over(store, verify) as (tier, slab):
        slab.write(0, 2, 1, slab.read(0, 2, 1)[::-1])
        outcome = copied(tier, False, (0, KEYS[:2], (1, 2)))
        assert outcome.done != verify
        assert store.present(KEYS[:2]) == [True, not verify]


def damage(store):
    file = store.folder / "01" / ("01" * 32)
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def be_slow(store):
    """Each look at the clock is six seconds after the one before."""
    store._ledger.clock = itertools.count(0, 6).__next__


def lose_what_was_opened(store):
    open_read = store.open_read

    def opened_and_lost(keys, lease_s):
        read = open_read(keys, lease_s)
        (store.folder / "01" / ("01" * 32)).unlink()
        return read

    store.open_read = opened_and_lost


@pytest.mark.parametrize("fault", [damage, be_slow, lose_what_was_opened])
def test_what_does_not_come_up_whole_is_told_of(store, fault):
    with tier_over(store) as (tier, _):
        assert copied(tier, False, (0, KEYS[:2], (0, 1))).done
        fault(store)
        outcome = copied(tier, True, (0, KEYS[:2], (2, 3)))
        assert (outcome.done, outcome.nbytes, outcome.reason != "") == (False, 0, True)


def test_an_object_of_another_size_does_not_come_up(store):
    with tier_over(store) as (tier, _):
        copied(tier, False, (0, KEYS[:1], (0,)))
        outcome = copied(tier, True, (1, KEYS[:1], (1,)))
        assert not outcome.done
        assert "recompute" in outcome.reason


def test_a_write_that_fails_leaves_what_was_whole_before_it(store):
    (store.folder / "01").write_bytes(b"no folder")
    with tier_over(store) as (tier, _):
        assert not copied(tier, False, (0, KEYS[:2], (0, 1))).done
        assert store.present(KEYS[:2]) == [True, False]


def test_a_full_store_takes_less(tmp_path):
    with tier_over(FolderStore(tmp_path, 8)) as (tier, _):
        outcome = copied(tier, False, (0, KEYS[:1], (0,)))
        assert (outcome.done, "write fewer" in outcome.reason) == (False, True)


def test_what_keeps_slots_from_being_written_is_said_once_until_some_are(store, caplog):
    def heard():
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return said

    with tier_over(store) as (tier, _):
        blocked = store.folder / KEYS[0].hex()[:2]
        for _ in range(2):
            blocked.write_bytes(b"no folder")
            copied(tier, False, (0, KEYS[:1], (0,)))
            (said,) = heard()
            assert said.startswith(f"not kept below the slab: {store.folder}: ")
            copied(tier, False, (0, KEYS[:1], (0,)))
            assert heard() == []
            blocked.unlink()
            assert copied(tier, False, (0, KEYS[:1], (0,))).done
            assert heard() == []
            store.evict(KEYS[:1])
            blocked.rmdir()


def test_copies_that_do_not_end_are_told_of_at_the_close(tmp_path):
    store = Stuck(tmp_path, 1 << 20)
    with tier_over(store) as (tier, _):
        for number in range(3):
            tier.begin(TierOrder(f"{number}", False, (KeyedSlots(0, KEYS[:1], (0,)),)))
        assert (tier.ended(), tier.idle) == ((), False)
        with pytest.raises(DeadlineExceeded, match="1 orders"):
            tier.close(0.01)
        store.let.set()
        tier.close(5)
        assert [outcome.reason for outcome in tier.ended()][1:] == ["cancelled"] * 2


def test_what_waits_for_bytes_does_not_wait_behind_what_is_written(store):
    with tier_over(store) as (tier, _):
        copied(tier, False, (0, KEYS[:1], (0,)))
        let, present = threading.Event(), store.present
        store.present = lambda keys: let.wait(30) and present(keys)
        tier.begin(TierOrder("down", False, (KeyedSlots(0, KEYS[1:2], (1,)),)))
        tier.begin(TierOrder("up", True, (KeyedSlots(0, KEYS[:1], (2,)),)))
        job = next(job for order, job in tier._jobs if order.fetch)
        job.result(5)
        assert [outcome.id for outcome in tier.ended()] == ["up"]
        let.set()
        tier.wait(5)
