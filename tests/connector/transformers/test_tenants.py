"""Who may read whose KV: salts and adapters, from request to pool. And pushes whose first token is the last."""

import pytest
from small_engines import pooled_engine, prompt_of
from test_pushes import finished, pair

from layercast.connector.transformers.requests import Finish, Params
from layercast.spec.keys import Extra, ExtraKind


def named(kind, name):
    return Params(max_tokens=2, extras={0: [Extra(kind, name)]} if name else None)


@pytest.mark.parametrize("kind", [ExtraKind.SALT, ExtraKind.ADAPTER, ExtraKind.EMBEDDINGS])
def test_tenants_and_adapters_never_find_one_anothers_prompt(models, kind):
    """LMCache#4825, vLLM#44250: a second tenant, or another adapter, was served the first one's prefix."""
    prompt, hits = prompt_of(70), {}
    with pooled_engine(models("llama")) as engine:
        for turn in range(2):
            for name in (None, b"a", b"b"):
                (result,) = engine.generate([prompt], named(kind, name))
                engine.drain(10)
                hits[turn, name] = result.loaded_tokens
    assert [hits[0, name] for name in (None, b"a", b"b")] == [0, 0, 0]
    assert [hits[1, name] for name in (None, b"a", b"b")] == [64, 64, 64]


def test_a_prompt_that_can_not_be_named_is_answered_and_never_stored(models, stock):
    prompt = prompt_of(70)
    params = Params(max_tokens=20, extras={1: [Extra(ExtraKind.EMBEDDINGS, b"")]})
    with pooled_engine(models("llama")) as engine:
        for _ in range(2):
            (result,) = engine.generate([prompt], params)
            engine.drain(10)
            assert (result.loaded_tokens, result.tokens) == (0, stock("llama", tuple(prompt))[0])


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_pushed_prompt_gives_as_many_tokens_and_logits_as_one_that_was_not(models, stock, most):
    """SGLang#7147, TensorRT-LLM#11727: one token too many, or the first one without its probabilities."""
    prompt = prompt_of(50)
    with pair(models("llama")) as (prefill, decode):
        prefill.submit(prompt, push=decode.offer(prompt, Params(max_tokens=most, logits=True)))
        finished(prefill)
        (result,) = finished(decode)
    tokens, logits = stock("llama", tuple(prompt))
    assert result.tokens == tokens[:most]
    assert result.logits.shape[0] == most
    assert (result.logits - logits[:most]).abs().max() < 2e-4


def test_a_pushed_prompt_whose_first_token_stops_it_ends_clean(models, stock):
    """vLLM-Omni#1303: a hand-off that hung on the finish reason sent nothing where the first token was the last."""
    prompt = prompt_of(50)
    first = stock("llama", tuple(prompt))[0][0]
    with pair(models("llama")) as (prefill, decode):
        prefill.submit(prompt, push=decode.offer(prompt, Params(max_tokens=20, stop=(first,))))
        (sent,) = finished(prefill)
        (result,) = finished(decode)
    assert (sent.finish, result.finish, result.tokens) == (Finish.PUSHED, Finish.STOP, (first,))
