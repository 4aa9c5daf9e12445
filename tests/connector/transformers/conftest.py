"""Tiny models, made once a session, and what plain transformers makes of them."""

from functools import cache

import pytest
import torch
from tiny_models import tiny_model
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

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
    """`stock(family, prompt)`: 20 greedy tokens and logits of plain transformers, the prompt in one forward."""

    @cache
    def greedy(family, prompt, tokens=20):
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
