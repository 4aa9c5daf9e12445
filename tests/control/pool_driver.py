"""An engine on oracle bytes that drives a pool as a real one would, and is at rest when it is done."""

import threading
from contextlib import contextmanager

from layercast.config import Config
from layercast.control.node import open_pool
from layercast.flow.orders import StepOrders
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.spec.identities import identities_of
from layercast.testing.oracle import ByteEngine

BLOCK, LAYERS, BLOCKS = 4, 6, 40
SPECS = [GroupSpec("full", GroupKind.FULL, BLOCK, tuple(range(LAYERS)))]
TOKENS = list(range(100, 100 + 8 * BLOCK + 1))


class Driver:
    """Drives a pool as an engine would, one request at a time, on oracle bytes."""

    def __init__(self, pool, engine, blocks):
        self.pool, self.engine, self.free, self.steps = pool, engine, list(range(blocks)), 0

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
def driver(block_major=False, dtype="uint8", blocks=BLOCKS, **settings):
    settings = {"host_bytes": 1 << 20, "kv_recompute_threshold": 0, **settings}
    threads = threading.active_count()
    engine = ByteEngine(SPECS, blocks, block_major=block_major, dtype=dtype)
    with open_pool(engine.layout, identities_of(engine.layout, model="m"), Config(**settings)) as pool:
        yield Driver(pool, engine, blocks)
        assert pool.idle
        pool.directory.check()
    assert threading.active_count() == threads


def flip(drive, tokens, block, layer):
    """Change one byte of a saved block."""
    slab = drive.pool.worker.ways.slab
    slot = drive.pool.directory._shelves[0].stored[drive.pool.match(tokens).keys[0][block]]
    data = bytearray(slab.read(0, slot, layer))
    data[7] ^= 1
    slab.write(0, slot, layer, bytes(data))
    return slot
