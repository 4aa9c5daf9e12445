"""Tiny models, made once a session, and what every engine must look like after a test."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from layercast.config import Config
from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.engine import Engine, EngineSettings
from layercast.testing.models import tiny_model

logging.set_verbosity_error()


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models():
    """`models(family)`: a tiny model, the same object all session long."""
    return cache(tiny_model)


@pytest.fixture(scope="session")
def stock(models):
    """`stock(family, prompt)`: 32 greedy tokens and logits of plain transformers, the prompt in one forward."""

    @cache
    def greedy(family, prompt, tokens=32):
        model = models(family)
        cached, new, ids, rows = DynamicCache(config=model.config), torch.tensor([prompt]), [], []
        at = 0
        for _ in range(tokens):
            positions = torch.arange(at, at + new.shape[1])[None]
            output = model(new, position_ids=positions, past_key_values=cached, use_cache=True)
            at += new.shape[1]
            rows.append(output.logits[0, -1])
            ids.append(int(rows[-1].argmax()))
            new = torch.tensor([ids[-1:]])
        return tuple(ids), torch.stack(rows)

    return greedy


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
def pooled_engine(model, config=None, transport=None, **changes):
    """An engine with a pool, at rest afterwards."""
    config = {"host_bytes": 16 << 20, "kv_recompute_threshold": 0} | (config or {})
    with open_engine(model, Config(**config), settings_of(**changes), transport=transport) as engine:
        yield engine
        engine.drain(10)
        assert_at_rest(engine)
        assert engine.pool.idle
        engine.pool.directory.check()
