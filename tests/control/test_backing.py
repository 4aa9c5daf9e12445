"""The tier under the slab: one pool writes behind to a folder, another one brings up from it; and what may go wrong."""

import os
import shutil
import threading
from contextlib import ExitStack

import pytest
from pool_driver import BLOCK, BLOCKS, LAYERS, SPECS, TOKENS, Driver, driver, flip

from layercast.control.backing import SPILL_SHARE, Backing
from layercast.control.directory import Directory
from layercast.control.node import open_pool
from layercast.errors import DeadlineExceeded, FolderLost, Refused
from layercast.flow.orders import StepOrders, TierOrder, TierOutcome
from layercast.spec.identities import identities_of
from layercast.store.folder import HEADER, UNFINISHED, FolderStore
from layercast.testing.clock import FakeClock
from layercast.testing.oracle import ByteEngine

BLOCK_FILES = 8


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fetch(drive, request, tokens):
    """Ask again until the pool says that nothing more comes up; how often it was asked."""
    asked = 1
    while drive.pool.bringing(request, tokens):
        drive.pool.reports(0, timeout_s=5)
        asked += 1
    return asked


def run(drive, request, tokens):
    """Bring up what there is, then run as an engine does."""
    asked = fetch(drive, request, tokens)
    loaded, outcomes, table, failed = drive.run(request, tokens)
    drive.drain()
    drive.pool.finish(request)
    assert drive.correct(tokens, table)
    return loaded, outcomes, failed, asked


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


def fill(folder, tokens=TOKENS, **settings):
    with driver(disk_path=str(folder), **settings) as drive:
        drive.run("cold", tokens)
        drive.drain()
        drive.drain()
    return files_of(folder)


def test_what_one_pool_saved_another_one_loads(folder):
    files = fill(folder)
    assert len(files) == BLOCK_FILES
    with driver(disk_path=str(folder)) as drive:
        loaded, outcomes, failed, asked = run(drive, "warm", TOKENS)
        assert (loaded, failed, [load.end for load in outcomes]) == (8 * BLOCK, False, ["landed"])
        assert outcomes[0].verified
        assert asked > 1
        assert fetch(drive, "again", TOKENS) == 1, "the slab has it now"


def test_an_object_is_the_layers_of_a_block_as_they_lie_in_the_slab(folder):
    with driver(disk_path=str(folder)) as drive:
        drive.run("cold", TOKENS)
        drive.drain()
        slab, match = drive.pool.worker.ways.slab, drive.pool.match(TOKENS)
        stored = drive.pool.directory._shelves[0].stored
        for key in match.keys[0]:
            layers = b"".join(slab.read(0, stored[key], layer) for layer in range(LAYERS))
            file = folder / "rank-0-of-1" / key.hex()[:2] / key.hex()
            assert file.read_bytes()[HEADER.size :] == layers


def test_what_was_brought_up_is_not_written_again(folder):
    fill(folder)
    before = [path.stat().st_ino for path in files_of(folder)]
    with driver(disk_path=str(folder)) as drive:
        run(drive, "warm", TOKENS)
    assert [path.stat().st_ino for path in files_of(folder)] == before


def test_a_longer_prompt_brings_up_its_head_and_computes_the_rest(folder):
    fill(folder)
    with driver(disk_path=str(folder)) as drive:
        longer = [*TOKENS[: 8 * BLOCK], *range(500, 500 + 2 * BLOCK)]
        assert run(drive, "warm", longer)[0] == 8 * BLOCK
    assert len(files_of(folder)) == BLOCK_FILES + 2


def test_another_identity_finds_nothing(folder):
    """Here: other dtypes of the same bytes."""
    fill(folder)
    with driver(disk_path=str(folder), dtype="int8") as drive:
        loaded, _, _, _ = run(drive, "warm", TOKENS)
        assert loaded == 0


def test_a_hit_shorter_than_the_threshold_is_not_brought_up(folder):
    fill(folder)
    with driver(disk_path=str(folder), kv_recompute_threshold=8 * BLOCK + 1) as drive:
        assert run(drive, "warm", TOKENS)[0] == 0
        assert drive.pool.directory.stats.saved == 8, "nothing but what it saved itself"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
@pytest.mark.parametrize("block", [0, 3, 7])
def test_a_damaged_file_is_absence_from_its_order_on_and_is_mended(folder, damage, block):
    """Blocks come up in orders of sixteen, so here nothing comes; then it is computed, saved and written again."""
    fill(folder)
    with driver(disk_path=str(folder)) as drive:
        key = drive.pool.match(TOKENS).keys[0][block].hex()
        file = folder / "rank-0-of-1" / key[:2] / key
        data = bytearray(file.read_bytes())
        data[-5] ^= 4
        {
            "flip": lambda: file.write_bytes(data),
            "cut": lambda: file.write_bytes(data[:-7]),
            "empty": lambda: file.write_bytes(b""),
            "gone": file.unlink,
        }[damage]()
        loaded, _, failed, _ = run(drive, "warm", TOKENS)
        assert (loaded, failed) == (block * BLOCK if damage == "gone" else 0, False)
    with driver(disk_path=str(folder)) as drive:
        assert run(drive, "mended", TOKENS)[0] == 8 * BLOCK


def test_an_object_of_another_size_is_absence(folder):
    with driver(disk_path=str(folder)) as drive:
        key = drive.pool.match(TOKENS).keys[0][0]
        store = FolderStore(folder / "rank-0-of-1", 1 << 20)
        with store.open_write([key], [5]) as handle:
            handle.write(0, 0, b"12345")
            handle.commit()
        assert run(drive, "warm", TOKENS)[0] == 0


def test_a_damaged_slot_is_not_written_behind(folder):
    """The digest taken at saving is compared before anything goes down."""
    with driver(disk_path=str(folder)) as drive:
        slab = drive.pool.worker.ways.slab
        slab.digests[0][2, :] = 7
        spoil = drive.pool.worker.tier._slab
        assert spoil is slab
        drive.run("cold", TOKENS[: BLOCK + 1])
        drive.drain()
        drive.drain()
        assert len(files_of(folder)) == 1
        flip(drive, TOKENS, 0, 2)
        slot = drive.pool.directory._shelves[0].stored[drive.pool.match(TOKENS).keys[0][0]]
        shutil.rmtree(folder)
        drive.pool.backing.saved("again", [drive.pool.match(TOKENS).keys[0][:1]])
        drive.drain()
        assert files_of(folder) == []
        assert slot >= 0


def test_a_folder_taken_away_costs_hits_and_nothing_else(folder):
    fill(folder)
    with driver(disk_path=str(folder)) as drive:
        shutil.rmtree(folder)
        assert run(drive, "one", TOKENS)[0] == 0
        folder_again = len(files_of(folder))
        assert folder_again == BLOCK_FILES, "the next write makes it again"
        shutil.rmtree(folder)
        folder.write_bytes(b"a file in its place")
        other = [token + 1000 for token in TOKENS]
        assert run(drive, "two", other)[0] == 0
        assert run(drive, "three", other)[0] == 8 * BLOCK, "from the slab"


def test_a_folder_that_can_not_be_used_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    before = threading.active_count()
    with pytest.raises(FolderLost, match="file"), driver(disk_path=str(tmp_path / "file")):
        pass
    assert threading.active_count() == before


def test_a_folder_without_room_keeps_what_was_used_last(folder):
    size = files_of(folder) or fill(folder)
    one = size[0].stat().st_size - HEADER.size
    shutil.rmtree(folder)
    fill(folder, disk_bytes=3 * one)
    assert len(files_of(folder)) == 3
    with driver(disk_path=str(folder), disk_bytes=3 * one) as drive:
        assert run(drive, "warm", TOKENS)[0] == 0, "the head of the prompt went first"


def test_a_slab_without_room_for_it_all_takes_none_of_it_and_computes(folder):
    fill(folder)
    with driver(disk_path=str(folder), host_bytes=4 * LAYERS * 300) as drive:
        slots = drive.pool.directory.slots[0]
        loaded = run(drive, "warm", TOKENS)[0]
        assert loaded <= slots * BLOCK
    assert not [path for path in files_of(folder) if path.name.endswith(UNFINISHED)]


def test_two_pools_that_save_the_same_prompt_at_once_leave_whole_objects(folder):
    with driver(disk_path=str(folder)) as one, ExitStack() as second:
        engine = ByteEngine(SPECS, BLOCKS)
        identities = identities_of(engine.layout, model="m")
        pool = second.enter_context(open_pool(engine.layout, identities, one.pool.config))
        other = Driver(pool, engine, BLOCKS)
        for chat in range(8):
            tokens = [token + chat * 100 for token in TOKENS]
            threads = [threading.Thread(target=run, args=(drive, f"{chat}", tokens)) for drive in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
    assert len(files_of(folder)) == 8 * BLOCK_FILES
    with driver(disk_path=str(folder)) as drive:
        for chat in range(8):
            assert run(drive, f"warm-{chat}", [token + chat * 100 for token in TOKENS])[0] == 8 * BLOCK


def test_verification_off_on_either_side_changes_nothing(folder):
    fill(folder, verify=False)
    with driver(disk_path=str(folder)) as drive:
        loaded, outcomes, _, _ = run(drive, "warm", TOKENS)
        assert (loaded, outcomes[0].verified) == (8 * BLOCK, True)


def test_a_worker_without_a_store_refuses_orders_for_one():
    with driver() as drive:
        order = TierOrder("fetch-0", True, ())
        with pytest.raises(Refused, match="settings"):
            drive.pool.begin(StepOrders(0, tier=(order,)))


# ---- the scheduler side alone ----


def backing_of(slots, *stores, ranks=1, least=0):
    directory = Directory([slots], FakeClock(), 10.0, ranks=ranks)
    return Backing(directory, stores, SPECS, least)


def keys_of(*numbers):
    return [[bytes([number]) * 32 for number in numbers]]


@pytest.fixture
def stored(tmp_path):
    """Makes a store in a folder of its own that has the keys of these numbers."""

    def make(*numbers, kind=FolderStore):
        store = kind(tmp_path / f"store-{len(list(tmp_path.iterdir()))}", 1 << 16)
        for key in keys_of(*numbers)[0]:
            with store.open_write([key], [1]) as handle:
                handle.write(0, 0, b"x")
                handle.commit()
        return store

    return make


def ended(order, done=True):
    return TierOutcome(order.id, order.fetch, done, 1, 0.0)


def ordered(backing, *numbers, request="r"):
    backing.seek(request, keys_of(*numbers), len(numbers) * BLOCK + 1)
    backing.wait(5)
    return backing.orders()


def test_only_what_lies_below_on_every_rank_is_brought_up(stored):
    backing = backing_of(16, stored(1, 2, 3), stored(1, 2, 4), ranks=2)
    (order,) = ordered(backing, 1, 2, 3, 4)
    assert order.blocks[0].keys == tuple(keys_of(1, 2)[0])
    backing.settle([ended(order)], 1)
    assert backing.directory.present(0, keys_of(1)[0]) == [False]
    backing.settle([ended(order)], 0)
    assert backing.directory.present(0, keys_of(1, 2, 3)[0]) == [True, True, False]
    assert backing.fetched("r")
    assert backing.directory.idle
    backing.close(5)


def test_what_did_not_come_up_on_one_rank_is_absent_on_all(stored):
    backing = backing_of(16, stored(1), stored(1), ranks=2)
    (order,) = ordered(backing, 1)
    backing.settle([ended(order)], 0)
    backing.settle([ended(order, done=False)], 1)
    assert backing.directory.present(0, keys_of(1)[0]) == [False]
    assert not backing.fetched("r")
    assert backing.directory.idle
    assert not backing.awaits_reports
    backing.close(5)


def test_nothing_is_brought_up_twice(stored):
    backing = backing_of(64, stored(*range(40)))
    first = ordered(backing, *range(40), request="a")
    assert [len(order.blocks[0].keys) for order in first] == [16, 16, 8]
    assert ordered(backing, *range(40), request="b") == ()
    backing.close(5)


def test_a_block_in_the_slab_is_not_looked_for_again(stored):
    backing = backing_of(64, stored(1, 2))
    for order in ordered(backing, 1, 2):
        backing.settle([ended(order)], 0)
    backing.seek("next", keys_of(1, 2), 3 * BLOCK)
    assert not backing.seeking("next")
    backing.close(5)


def test_a_request_that_ends_while_it_is_looked_for_leaves_nothing(stored):
    backing = backing_of(64, stored(1, 2))
    backing.seek("r", keys_of(1, 2), 3 * BLOCK)
    backing.forget("r")
    assert not backing.seeking("r")
    assert backing.orders() == ()
    (order,) = ordered(backing, 1, 2, request="other")
    backing.forget("other")
    backing.settle([ended(order)], 0)
    assert backing._fetched == {}
    assert backing.directory.present(0, keys_of(1, 2)[0]) == [True, True], "it was on its way, and others may want it"
    backing.close(5)


def test_what_is_on_its_way_up_is_dropped_once_nobody_asks_for_it_any_more(stored):
    backing = backing_of(64, stored(1, 2))
    (order,) = ordered(backing, 1)
    backing.seek("s", keys_of(1, 2), 3 * BLOCK)
    backing.wait(5)
    backing.retire()
    assert backing.orders() == ()
    backing.settle([ended(order)], 0)
    assert backing.directory.present(0, keys_of(1)[0]) == [False]
    assert backing.directory.idle
    assert not backing.busy
    backing.close(5)


def test_a_store_that_fails_has_nothing(stored):
    store = stored(1)
    store.close()
    backing = backing_of(64, store)
    assert ordered(backing, 1) == ()
    assert not backing.seeking("r")
    backing.close(5)


def test_a_part_of_the_slab_is_kept_for_what_is_written_behind_and_the_rest_follows(stored):
    backing = backing_of(4 * SPILL_SHARE, stored())
    directory = backing.directory
    keys = keys_of(*range(1, 11))
    directory.commit(directory.reserve("r", keys).id)
    for number in keys[0]:
        backing.saved("r", [[number]])
    orders, written = backing.orders(), []
    assert (len(orders), directory.room()) == (4, (4 * SPILL_SHARE - 4,))
    while orders:
        written += [key for order in orders for key in order.blocks[0].keys]
        for order in orders:
            backing.settle([ended(order, done=False)], 0)
        orders = backing.orders()
    assert written == keys[0]
    assert directory.idle
    assert not backing.busy
    backing.close(5)


def test_what_is_evicted_before_its_turn_is_not_written_behind(stored):
    backing = backing_of(8, stored())
    directory = backing.directory
    keys = keys_of(1, 2, 3)
    directory.commit(directory.reserve("r", keys).id)
    for number in keys[0]:
        backing.saved("r", [[number]])
    (order,) = backing.orders()
    directory.commit(directory.reserve("s", keys_of(*range(11, 17))).id)
    assert directory.present(0, keys[0]).count(True) == 2, "the one that is kept, and the one used last"
    backing.settle([ended(order)], 0)
    (order,) = backing.orders()
    backing.settle([ended(order)], 0)
    assert backing.orders() == ()
    assert directory.idle
    backing.close(5)


def test_a_small_slab_writes_a_long_prompt_behind_whole(folder):
    tokens = list(range(100, 100 + 38 * BLOCK + 1))
    assert len(fill(folder, tokens, host_bytes=120 << 10)) == 38


def test_slots_that_are_written_behind_are_not_handed_out(stored):
    backing = backing_of(8, stored())
    directory = backing.directory
    keys = keys_of(1)
    directory.commit(directory.reserve("r", keys).id)
    backing.saved("r", keys)
    (order,) = backing.orders()
    more = directory.reserve("s", keys_of(*range(2, 9)))
    assert order.blocks[0].slots[0] not in more.slots[0]
    assert directory.room() == (0,)
    backing.settle([ended(order)], 0)
    assert directory.room() == (1,)
    directory.revoke(more.id)
    directory.check()
    backing.close(5)


def test_nobody_waits_for_what_comes_up_for_another_prompt(folder):
    fill(folder)
    held = threading.Event()
    with driver(disk_path=str(folder)) as drive:
        drive.pool.worker.tier._fetching.submit(held.wait, 30)
        while not drive.pool.backing.fetching:
            assert drive.pool.bringing("ours", TOKENS)
            drive.pool.backing.wait(5)
        asked = 1
        while drive.pool.bringing("other", [9, *TOKENS]):
            drive.pool.backing.wait(5)
            asked += 1
        assert asked <= 2
        assert drive.pool.bringing("ours", TOKENS)
        assert drive.pool.bringing("alike", TOKENS[: 4 * BLOCK + 1])
        held.set()
        drive.drain()
        assert not drive.pool.bringing("ours", TOKENS)
        assert drive.pool.match(TOKENS).tokens == 8 * BLOCK


def test_no_thread_is_left(folder):
    before = {thread.name for thread in threading.enumerate()}
    descriptors = len(os.listdir("/proc/self/fd"))
    fill(folder)
    assert {thread.name for thread in threading.enumerate()} == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


class Stuck(FolderStore):
    """Never answers, until it is told to."""

    def __init__(self, folder, capacity):
        super().__init__(folder, capacity)
        self.let = threading.Event()

    def present(self, keys):
        self.let.wait(30)
        return super().present(keys)


def test_a_store_that_does_not_answer_holds_up_nobody_and_no_end(stored):
    store, threads = stored(kind=Stuck), threading.active_count()
    backing = backing_of(64, store)
    backing.seek("r", keys_of(1, 2), 3 * BLOCK)
    backing.seek("s", keys_of(1, 2), 3 * BLOCK)
    assert backing.seeking("r")
    assert backing.orders() == ()
    with pytest.raises(DeadlineExceeded):
        backing.wait(0.01)
    backing.forget("r")
    with pytest.raises(DeadlineExceeded):
        backing.close(0.01)
    store.let.set()
    backing.close(5)
    assert threading.active_count() == threads


def test_kv_of_a_renewed_identity_goes_nowhere_below(folder):
    fill(folder)
    with driver(disk_path=str(folder)) as drive:
        drive.pool.renew()
        assert run(drive, "one", TOKENS)[0] == 0
        assert run(drive, "two", TOKENS)[0] == 8 * BLOCK
    assert len(files_of(folder)) == BLOCK_FILES
