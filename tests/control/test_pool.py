"""The embedded pool over real memory: every loaded byte is the saved one, or the load fails."""

import threading
from contextlib import contextmanager

import pytest

from layercast.config import Config
from layercast.control.node import open_pool
from layercast.flow.orders import LoadEnd, StepOrders
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.spec.identities import identities_of
from layercast.testing.oracle import ByteEngine

BLOCK, LAYERS, BLOCKS = 4, 6, 40
SPECS = [GroupSpec("full", GroupKind.FULL, BLOCK, tuple(range(LAYERS)))]


class Driver:
    """Drives a pool as an engine would, one request at a time, on oracle bytes."""

    def __init__(self, pool, engine):
        self.pool, self.engine, self.free, self.steps, self.calls = pool, engine, list(range(BLOCKS)), 0, 0

    def run(self, request, tokens, chunks=None, tamper=None, between=None):
        """Prefill `tokens`, loading what the pool has; (tokens loaded, outcomes, blocks by index)."""
        match = self.pool.match(tokens)
        table = [self.free.pop(0) for _ in range(-(-len(tokens) // BLOCK))]
        if between:
            between()
        load = self.pool.load_order(request, match, [table])
        done = match.tokens if load else 0
        outcomes, failed = [], False
        for end in chunks or [len(tokens)]:
            if end <= done:
                continue
            save = self.pool.save_order(request, tokens, done, end, [table])
            step = self.pool.begin(StepOrders(self.steps, (load,) if load else (), (save,) if save else ()))
            for layer in range(LAYERS):
                if tamper:
                    tamper(layer)
                step.wait(layer)
                self.calls += 1
                for block in range(done // BLOCK, end // BLOCK):
                    self.engine.write(layer, table[block], tokens[: (block + 1) * BLOCK])
                step.written(layer)
            settled = self.pool.settle(step.end())
            self.steps += 1
            outcomes += settled.loads
            failed |= bool(settled.failed)
            load, done = None, end
        outcomes += self.drain()
        self.free += table
        return match.tokens, outcomes, table, failed

    def drain(self):
        return list(self.pool.reports(self.steps, timeout_s=5).loads)

    def correct(self, tokens, table):
        return all(
            self.engine.holds(layer, table[block], tokens[: (block + 1) * BLOCK])
            for layer in range(LAYERS)
            for block in range(len(tokens) // BLOCK)
        )


@contextmanager
def driver(block_major=False, **settings):
    settings = {"host_bytes": 1 << 20, "kv_recompute_threshold": 0, **settings}
    threads = threading.active_count()
    engine = ByteEngine(SPECS, BLOCKS, block_major=block_major)
    with open_pool(engine.layout, identities_of(engine.layout, model="m"), Config(**settings)) as pool:
        yield Driver(pool, engine)
        assert pool.idle
        pool.directory.check()
    assert threading.active_count() == threads


TOKENS = list(range(100, 100 + 8 * BLOCK + 1))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("block_major", [True, False])
@pytest.mark.parametrize("window", [1, 2, 4, 6])
def test_what_is_loaded_is_what_was_saved(block_major, window, verify):
    with driver(block_major, layerwise_window=window, verify=verify) as drive:
        assert drive.run("cold", TOKENS)[0] == 0

        tokens, outcomes, table, failed = drive.run("warm", TOKENS)

        assert tokens == 8 * BLOCK
        assert not failed
        assert drive.correct(TOKENS, table)
        (outcome,) = outcomes
        assert outcome.end is LoadEnd.LANDED
        assert outcome.verified is verify
        assert outcome.nbytes == 8 * BLOCK * 24 * LAYERS
        assert outcome.layers == LAYERS


def test_bulk_moves_the_same_bytes_as_layerwise():
    with driver(use_layerwise=False) as drive:
        drive.run("cold", TOKENS)
        _, (outcome,), table, _ = drive.run("warm", TOKENS)
        assert drive.correct(TOKENS, table)
        assert outcome.layers == LAYERS


@pytest.mark.parametrize(("blocks", "nbytes"), [(3, 0), (0, 100), (1, 1), (2, 500)])
def test_limits_on_a_batch_change_no_byte(blocks, nbytes):
    with driver(layerwise_max_transfer_blocks=blocks, layerwise_max_transfer_bytes=nbytes) as drive:
        drive.run("cold", TOKENS)
        tokens, (outcome,), table, _ = drive.run("warm", TOKENS)
        assert tokens == 8 * BLOCK
        assert outcome.end is LoadEnd.LANDED
        assert drive.correct(TOKENS, table)


@pytest.mark.parametrize("chunks", [[33], [4, 33], [1, 2, 3, 33], [16, 17, 33], [31, 32, 33]])
def test_any_chunking_of_a_prefill_saves_the_same_keys(chunks):
    with driver() as drive:
        drive.run("cold", TOKENS, chunks=chunks)
        keys = drive.pool.match(TOKENS).keys[0]
        assert drive.pool.directory.present(0, keys) == [True] * 8
        assert drive.pool.match(TOKENS).tokens == 8 * BLOCK


def test_a_flipped_byte_fails_the_load_and_is_never_offered_again():
    with driver() as drive:
        drive.run("cold", TOKENS)
        slab = drive.pool.worker.ways.slab
        slot = drive.pool.directory._shelves[0].stored[drive.pool.match(TOKENS).keys[0][5]].slot
        data = bytearray(slab.read(0, slot, 3))
        data[7] ^= 1
        slab.write(0, slot, 3, bytes(data))

        tokens, (outcome,), _, failed = drive.run("warm", TOKENS)

        assert tokens == 8 * BLOCK
        assert failed
        assert outcome.end is LoadEnd.CORRUPT
        assert outcome.bad_slots == ((0, slot),)
        assert drive.pool.match(TOKENS).tokens == 5 * BLOCK


def test_blocks_lost_between_promise_and_load_are_recomputed():
    with driver() as drive:
        drive.run("cold", TOKENS)
        keys = drive.pool.match(TOKENS).keys[0]

        tokens, outcomes, table, failed = drive.run(
            "warm", TOKENS, between=lambda: drive.pool.directory.forget(0, keys[3:4])
        )

        assert tokens == 8 * BLOCK
        assert outcomes == []
        assert not failed
        assert drive.correct(TOKENS, table)


def test_the_number_of_steps_is_a_constant_of_the_model():
    with driver() as drive:
        counts = []
        for request, tokens in [("cold", TOKENS), ("warm", TOKENS), ("short", TOKENS[:2]), ("other", [7] * 9)]:
            before = drive.calls
            drive.run(request, tokens)
            counts.append(drive.calls - before)
        keys = drive.pool.match(TOKENS).keys[0]
        before = drive.calls
        drive.run("lost", TOKENS, between=lambda: drive.pool.directory.forget(0, keys[:1]))
        counts.append(drive.calls - before)
        assert set(counts) == {LAYERS}


def test_a_save_without_room_is_dropped_and_serving_goes_on():
    small = 3 * BLOCK * 24 * LAYERS + 4096
    with driver(host_bytes=small) as drive:
        slots = drive.pool.worker.ways.slab.slots[0]
        assert slots < BLOCKS - 1
        long = list(range(1000, 1000 + (slots + 1) * BLOCK))
        tokens, _, _, failed = drive.run("long", long)
        assert not failed
        assert tokens == 0
        assert drive.pool.directory.stats.saves_dropped == 1
        assert drive.pool.match(long).tokens == 0


def test_a_step_whose_hooks_do_not_fire_fails_its_load_and_names_the_layers():
    with driver() as drive:
        drive.run("cold", TOKENS)
        match = drive.pool.match(TOKENS)
        table = list(range(9))
        order = drive.pool.load_order("warm", match, [table])
        step = drive.pool.begin(StepOrders(9, (order,)))
        for layer in range(LAYERS - 1):
            step.wait(layer)
        settled = drive.pool.settle(step.end())
        assert settled.failed == ("warm",)
        outcomes = [*settled.loads, *drive.drain()]
        assert outcomes[0].end is LoadEnd.LATE
        assert f"[{LAYERS - 1}]" in outcomes[0].reason


def test_layers_without_a_hook_are_swept_into_the_save_and_counted():
    with driver() as drive:
        table = list(range(8))
        save = drive.pool.save_order("cold", TOKENS, 0, 32, [table])
        step = drive.pool.begin(StepOrders(0, (), (save,)))
        for layer in range(LAYERS):
            step.wait(layer)
            for block in range(8):
                drive.engine.write(layer, block, TOKENS[: (block + 1) * BLOCK])
            if layer % 2 == 0:
                step.written(layer)
        first = drive.pool.settle(step.end())
        saves = [*first.saves, *drive.pool.reports(1, timeout_s=5).saves]
        assert saves[0].swept_layers == LAYERS // 2
        _, (outcome,), out, _ = drive.run("warm", TOKENS)
        assert outcome.end is LoadEnd.LANDED
        assert drive.correct(TOKENS, out)
