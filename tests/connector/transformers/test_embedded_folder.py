"""Embedded engines that share a folder, one after the other and at once."""

import pytest
from small_engines import pooled_engine, prompt_of

from layercast.connector.transformers.requests import Params

ANSWER = Params(max_tokens=8)


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_another_engine_loads_what_one_has_saved(models, stock, tmp_path, family):
    """Groups with all blocks, with windows, and with recurrent states."""
    prompt, config = prompt_of(150), {"disk_path": str(tmp_path)}
    with pooled_engine(models(family), config) as engine:
        (cold,) = engine.generate([prompt], ANSWER)
        (warm,) = engine.generate([prompt], ANSWER)
        assert warm.receipt.tier == "host"
    with pooled_engine(models(family), config) as engine:
        (other,) = engine.generate([prompt], ANSWER)
        assert other.loaded_tokens == warm.loaded_tokens > 100
        assert (other.receipt.tier, other.receipt.verified) == ("disk", True)
    assert other.tokens == cold.tokens == stock(family, tuple(prompt))[0][:8]


def test_requests_that_find_nothing_below_are_computed_at_once(models, tmp_path):
    with pooled_engine(models("llama"), {"disk_path": str(tmp_path)}) as engine:
        results = engine.generate([prompt_of(100, seed) for seed in range(6)], ANSWER)
        assert [result.loaded_tokens for result in results] == [0] * 6


def test_other_weights_find_nothing(models, tmp_path):
    prompt, config = prompt_of(100), {"disk_path": str(tmp_path)}
    with pooled_engine(models("llama"), config) as engine:
        engine.generate([prompt], ANSWER)
    with pooled_engine(models("qwen3"), config) as engine:
        (result,) = engine.generate([prompt], ANSWER)
        assert result.loaded_tokens == 0


def test_aborts_while_blocks_come_up_leave_nothing(models, tmp_path):
    prompt, config = prompt_of(150), {"disk_path": str(tmp_path)}
    with pooled_engine(models("llama"), config) as engine:
        (cold,) = engine.generate([prompt], ANSWER)
    with pooled_engine(models("llama"), config) as engine:
        for steps in range(4):
            request = engine.submit(prompt, ANSWER)
            for _ in range(steps):
                engine.step()
            engine.abort(request)
        (other,) = engine.generate([prompt], ANSWER)
        assert other.tokens == cold.tokens
