"""Copies between a slab and a store: whole and checked, or told of; on threads that outlive no close."""

import threading
from contextlib import contextmanager

import pytest
import xxhash

from layercast.errors import DeadlineExceeded
from layercast.flow.orders import KeyedSlots, TierOrder
from layercast.flow.tier import Tier
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.store.memory import MemoryStore
from layercast.store.slab import Slab
from layercast.testing.faults import FakeClock, Faults, FaultyStore
from layercast.testing.oracle import ByteEngine

SPECS = [GroupSpec("full", GroupKind.FULL, 4, (0, 1)), GroupSpec("state", GroupKind.RECURRENT, 8, (2, 3, 4))]
KEYS = tuple(bytes([number]) * 32 for number in range(8))


class Stuck(MemoryStore):
    """Answers nothing until it is told to."""

    def __init__(self):
        super().__init__(1 << 20, FakeClock())
        self.let = threading.Event()

    def present(self, keys):
        self.let.wait(30)
        return super().present(keys)


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


def store_of(capacity=1 << 20):
    return MemoryStore(capacity, FakeClock())


def copied(tier, fetch, *blocks):
    """The outcome of one order for (group, keys, slots)."""
    tier.begin(TierOrder("order", fetch, tuple(KeyedSlots(*block) for block in blocks)))
    tier.wait(5)
    (outcome,) = tier.ended()
    assert tier.idle
    return outcome


def content(slab, group, slot):
    return [slab.read(group, slot, layer) for layer in slab.layout.groups[group].layers]


def test_what_went_down_comes_up_in_other_slots_with_its_digests():
    with tier_over(store_of()) as (tier, slab):
        down = copied(tier, False, (0, KEYS[:2], (3, 1)), (1, KEYS[2:3], (0,)))
        up = copied(tier, True, (0, KEYS[:2], (0, 2)), (1, KEYS[2:3], (3,)))
        assert down.done
        assert up.done
        assert down.nbytes == up.nbytes == sum((2, 1)[g] * slab.layout.groups[g].block_bytes for g in (0, 1))
        for group, source, target in ((0, 3, 0), (0, 1, 2), (1, 0, 3)):
            assert content(slab, group, source) == content(slab, group, target)
            assert (slab.digests[group][:, source] == slab.digests[group][:, target]).all()


def test_what_is_there_is_not_written_again():
    store = store_of()
    with tier_over(store) as (tier, _):
        copied(tier, False, (0, KEYS[:1], (0,)))
        used = store.used
        again = copied(tier, False, (0, KEYS[:1], (1,)))
        assert (again.done, again.nbytes, store.used) == (True, 0, used)


@pytest.mark.parametrize("verify", [True, False])
def test_a_slot_that_is_not_what_was_saved_does_not_go_down(verify):
    store = store_of()
    with tier_over(store, verify) as (tier, slab):
        slab.write(0, 2, 1, slab.read(0, 2, 1)[::-1])
        outcome = copied(tier, False, (0, KEYS[:2], (1, 2)))
        assert outcome.done != verify
        assert store.present(KEYS[:2]) == [True, not verify]


@pytest.mark.parametrize(
    "faults", [Faults(fail_read_at=2), Faults(delay_s=6.0), Faults(evict_after_open=True)], ids=str
)
def test_what_does_not_come_up_whole_is_told_of(faults):
    clock = FakeClock()
    store = FaultyStore(MemoryStore(1 << 20, clock), clock)
    with tier_over(store) as (tier, _):
        assert copied(tier, False, (0, KEYS[:2], (0, 1))).done
        store.faults = faults
        outcome = copied(tier, True, (0, KEYS[:2], (2, 3)))
        assert (outcome.done, outcome.nbytes, outcome.reason != "") == (False, 0, True)


def test_an_object_of_another_size_does_not_come_up():
    with tier_over(store_of()) as (tier, _):
        copied(tier, False, (0, KEYS[:1], (0,)))
        outcome = copied(tier, True, (1, KEYS[:1], (1,)))
        assert not outcome.done
        assert "recompute" in outcome.reason


@pytest.mark.parametrize("faults", [Faults(fail_write_at=3), Faults(short_write_at=1)], ids=str)
def test_a_write_that_fails_leaves_what_was_whole_before_it(faults):
    clock = FakeClock()
    store = FaultyStore(MemoryStore(1 << 20, clock), clock, faults)
    with tier_over(store) as (tier, _):
        assert not copied(tier, False, (0, KEYS[:2], (0, 1))).done
        assert store.present(KEYS[:2]) == [faults.fail_write_at is not None, False]


def test_a_full_store_takes_less():
    with tier_over(store_of(capacity=8)) as (tier, _):
        outcome = copied(tier, False, (0, KEYS[:1], (0,)))
        assert (outcome.done, "write fewer" in outcome.reason) == (False, True)


def test_copies_that_do_not_end_are_told_of_at_the_close():
    store = Stuck()
    with tier_over(store) as (tier, _):
        for number in range(3):
            tier.begin(TierOrder(f"{number}", False, (KeyedSlots(0, KEYS[:1], (0,)),)))
        assert (tier.ended(), tier.idle) == ((), False)
        with pytest.raises(DeadlineExceeded, match="1 orders"):
            tier.close(0.01)
        store.let.set()
        tier.close(5)
        assert [outcome.reason for outcome in tier.ended()][1:] == ["cancelled"] * 2


def test_what_waits_for_bytes_does_not_wait_behind_what_is_written():
    store = store_of()
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
