"""Engines as the tests of this room use them: small, poisoned, and at rest when they are done."""

from collections import Counter
from contextlib import contextmanager

import torch

from layercast.config import Config
from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.engine import Engine, EngineSettings
from layercast.control.scheduler import Match, Settled
from layercast.flow.orders import StepReport
from layercast.plan.prefix import Usable


def prompt_of(length, seed=1):
    """`length` token ids drawn at random."""
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def settings_of(**changes):
    """Small sizes, and NaN in every free block."""
    return EngineSettings(**{"blocks": 64, "chunk_blocks": 3, "poison": True} | changes)


def assert_every_reference_owned(space, live):
    """Every reference of a block belongs to one of the live tables or to a copy under way."""
    counted = [Counter() for _ in space.specs]
    for tables in live:
        for index, table in enumerate(tables.groups):
            state = [tables.state] if index == space.recurrent else []
            counted[index].update(block for block in (*table, *state) if block is not None)
    for hold in space._holds.values():
        for pair in hold.pairs:
            counted[pair.group].update(pair.blocks)
    assert [allocator.references() for allocator in space.allocators] == counted


def assert_no_block_lost(engine):
    """Every held block belongs to a request or to a copy under way."""
    assert_every_reference_owned(engine.space, [request.tables for request in engine._live.values()])


def assert_at_rest(engine):
    """All blocks are back, and no request is left."""
    assert_no_block_lost(engine)
    assert engine.idle
    assert [allocator.free for allocator in engine.space.allocators] == [a.count for a in engine.space.allocators]


class FreeStep:
    """A step that moves nothing."""

    def __init__(self, step):
        self.step = step

    def wait(self, layer):
        pass

    def written(self, layer):
        pass

    def end(self):
        return StepReport(self.step)


class NoPool:
    """What an engine calls of a pool, which finds nothing and keeps nothing."""

    busy_below, config = False, Config()

    def match(self, tokens, extras=None):
        return Match(Usable(0, ()), ())

    def bringing(self, request, tokens, extras=None):
        return False

    def brought_up(self, request):
        return False

    def save_order(self, request, tokens, before, after, tables, extras=None):
        return None

    def begin(self, orders):
        return FreeStep(orders.step)

    def settle(self, report):
        return Settled((), (), ())

    def reports(self, step, timeout_s=0.0):
        return Settled((), (), ())

    def abort(self, request):
        pass

    def finish(self, request):
        pass


@contextmanager
def bare_engine(model, **changes):
    """An engine without a pool, at rest afterwards."""
    engine = Engine(model, lambda layout: NoPool(), settings_of(**changes))
    yield engine
    assert_at_rest(engine)


@contextmanager
def pooled_engine(model, config=None, transport=None, link_gbps=None, **changes):
    """An engine with a pool, at rest afterwards."""
    config = {"host_bytes": 16 << 20, "kv_recompute_threshold": 0} | (config or {})
    with open_engine(
        model, Config(**config), settings_of(**changes), transport=transport, link_gbps=link_gbps
    ) as engine:
        yield engine
        engine.drain(10)
        assert_at_rest(engine)
        assert engine.pool.idle
        engine.pool.directory.check()


def flip(engine, prompt, layer, kind):
    """Flip one bit of one plane of one layer in the slab, in the last block that a load of `prompt` reads."""
    group = engine.memory.layout.group_of(layer)
    match = engine.pool.match(prompt)
    key = match.keys[group][match.needed[group][-1]]
    slot = engine.pool.directory._shelves[group].stored[key]
    slab, at = engine.pool.worker.ways.slab, 0
    for plane in engine.memory.layout.groups[group].planes_of(layer):
        at += plane.block_bytes
        if plane.kind is kind:
            break
    data = bytearray(slab.read(group, slot, layer))
    data[at - 1] ^= 0x40  # the exponent of the last element (little-endian float32)
    slab.write(group, slot, layer, bytes(data))
