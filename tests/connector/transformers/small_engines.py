"""Engines as the tests of this room use them: small, poisoned, and at rest when they are done."""

from contextlib import contextmanager

import torch

from layercast.config import Config
from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.engine import Engine, EngineSettings


def prompt_of(length, seed=1):
    """`length` token ids drawn at random."""
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def settings_of(**changes):
    """Small sizes, and NaN in every free block."""
    return EngineSettings(**{"blocks": 64, "chunk_blocks": 3, "poison": True} | changes)


def assert_at_rest(engine):
    """All blocks are back, and no request is left."""
    engine.check()
    assert engine.idle
    assert [allocator.free for allocator in engine.space.allocators] == [a.count for a in engine.space.allocators]


@contextmanager
def bare_engine(model, **changes):
    """An engine without a pool, at rest afterwards."""
    engine = Engine(model, settings_of(**changes))
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
