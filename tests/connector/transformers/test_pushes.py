import threading
from contextlib import contextmanager

import pytest
from small_engines import pooled_engine, prompt_of
from tiny_models import tiny_model

from layercast.connector.transformers.requests import Finish, Params
from layercast.errors import Full, LayoutMismatch, Refused
from layercast.flow.orders import LoadEnd, LoadOutcome
from layercast.transport.socket import SocketTransport

FAMILIES = ["llama", "qwen3", "gemma3", "deepseek_v3", "gpt_oss", "granite4", "qwen3_next", "falcon_h1"]
SECRET = b"0123456789abcdef"
LONG = Params(max_tokens=20)


@contextmanager
def pair(model, other=None, config=None, other_config=None, **changes):
    """A prefill and a decode engine, joined; threads end with them."""
    before = threading.active_count()
    ends = [SocketTransport(SECRET) for _ in range(2)]
    with (
        pooled_engine(model, config, transport=ends[0], **changes) as prefill,
        pooled_engine(other or model, other_config or config, transport=ends[1], **changes) as decode,
    ):
        yield prefill, decode
        prefill.drain(10)
        decode.drain(10)
    assert threading.active_count() == before


def finished(engine):
    """Step until nothing is left to answer; all results."""
    results = []
    while engine._live:
        results += [output.result for output in engine.step() if output.result]
    return results


@pytest.mark.parametrize(
    ("family", "length"), [(f, n) for f in FAMILIES for n in (17, 150)] + [("llama", n) for n in (2, 15, 16, 18)]
)
def test_a_pushed_prompt_answers_as_a_cold_one_and_the_receiver_computes_one_token(models, stock, family, length):
    prompt = prompt_of(length)
    with pair(models(family)) as (prefill, decode):
        ticket = decode.offer(prompt, LONG)
        prefill.submit(prompt, push=ticket)
        (sent,) = finished(prefill)
        (result,) = finished(decode)
        assert (sent.finish, sent.tokens, sent.computed_tokens) == (Finish.PUSHED, (), length - 1)
        assert (result.computed_tokens, result.loaded_tokens) == (1, length - 1)
        (receipt,) = [outcome for outcome in result.receipts if isinstance(outcome, LoadOutcome)]
        assert (receipt.end, receipt.verified) == (LoadEnd.LANDED, True)
    assert result.tokens == stock(family, tuple(prompt))[0]


def test_several_pushes_at_once_answer_as_cold_ones(models, stock):
    prompts = [prompt_of(150, seed) for seed in range(3)]
    with pair(models("gemma3")) as (prefill, decode):
        for prompt in prompts:
            prefill.submit(prompt, push=decode.offer(prompt, LONG))
        finished(prefill)
        results = finished(decode)
    answers = {result.request: result.tokens for result in results}
    assert [answers[id] for id in sorted(answers)] == [stock("gemma3", tuple(prompt))[0] for prompt in prompts]


def test_what_the_prefill_engine_loads_from_its_pool_is_pushed_too(models, stock):
    prompt = prompt_of(150)
    with pair(models("llama")) as (prefill, decode):
        prefill.generate([prompt], Params(max_tokens=1))
        prefill.drain(10)
        prefill.submit(prompt, push=decode.offer(prompt, LONG))
        (sent,) = finished(prefill)
        assert sent.loaded_tokens == 144
        (result,) = finished(decode)
    assert result.tokens == stock("llama", tuple(prompt))[0]


@pytest.mark.parametrize("family", ["llama", "granite4"])
def test_others_are_answered_while_a_push_is_awaited(models, stock, family):
    prompt, other = prompt_of(100), prompt_of(37)
    with pair(models(family)) as (prefill, decode):
        ticket = decode.offer(prompt, LONG)
        (result,) = decode.generate([other], LONG)
        assert result.tokens == stock(family, tuple(other))[0]
        prefill.submit(prompt, push=ticket)
        finished(prefill)
        (result,) = finished(decode)
    assert result.tokens == stock(family, tuple(prompt))[0]


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_a_push_that_the_prefill_engine_gives_up_is_recomputed_by_the_receiver(models, stock, family, steps):
    prompt = prompt_of(150)
    with pair(models(family)) as (prefill, decode):
        ticket = decode.offer(prompt, LONG)
        request = prefill.submit(prompt, push=ticket)
        for _ in range(steps):
            prefill.step()
        prefill.abort(request)
        prefill.drain(10)
        (result,) = finished(decode)
    assert result.tokens == stock(family, tuple(prompt))[0]
    assert (result.computed_tokens, result.loaded_tokens, result.recomputed_tokens) == (150, 0, 149)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_receiver_that_gives_up_ends_the_prefill_too_and_nothing_leaks(models, steps):
    prompt = prompt_of(150)
    with pair(models("llama")) as (prefill, decode):
        ticket = decode.offer(prompt, LONG)
        prefill.submit(prompt, push=ticket)
        for _ in range(steps):
            prefill.step()
        decode.abort(ticket.request)
        (sent,) = finished(prefill)
    assert (sent.finish, sent.receipt.detail[:11]) == (Finish.UNDELIVERED, "the push is")


@pytest.mark.parametrize("ending", ["checked", "given up", "gone"])
def test_a_push_is_said_to_be_delivered_when_its_receiver_has_checked_it_and_not_before(models, monkeypatch, ending):
    monkeypatch.setattr("layercast.connector.transformers.engine.REPORT_WAIT_S", 0.02)
    prompt, stuck = prompt_of(37), threading.Event()
    with pair(models("llama")) as (prefill, decode):
        ticket = decode.offer(prompt, LONG)
        target = decode.pushes.node.target
        handle, target.handle = target.handle, lambda *said: (stuck.wait(10), handle(*said))
        request = prefill.submit(prompt, push=ticket)
        outputs = [output for _ in range(3) for output in prefill.step()]
        assert outputs == []
        assert not prefill._schedule.busy, "every token has run"
        if ending == "given up":
            decode.abort(ticket.request)
        if ending == "gone":
            prefill.pushes.node._transport.disconnect(prefill.pushes.node.source.push(ticket.transfer).peer)
        stuck.set()
        prefill.drain(10)
        (sent,) = finished(prefill)
        finished(decode)
        assert decode._live == {}
    assert (sent.request, sent.computed_tokens) == (request, 36)
    assert sent.finish is (Finish.PUSHED if ending == "checked" else Finish.UNDELIVERED)
    assert sent.receipt.detail[:11] == ("" if ending == "checked" else "the push is")


def test_a_push_that_never_comes_is_recomputed_after_its_deadline(models, stock):
    prompt = prompt_of(37)
    with pair(models("llama"), config={"push_timeout_s": 0.2}) as (_, decode):
        decode.offer(prompt, LONG)
        (result,) = finished(decode)
    assert result.tokens == stock("llama", tuple(prompt))[0]
    assert result.loaded_tokens == 0


def test_a_flipped_bit_on_the_way_is_caught_and_recomputed(models, stock, monkeypatch):
    prompt = prompt_of(37)
    with pair(models("llama")) as (prefill, decode):
        ticket = decode.offer(prompt, LONG)
        target = decode.memory.tensors[2]
        monkeypatch.setattr(decode.pushes.node.target, "handle", _after(_spoil, target, ticket, decode))
        prefill.submit(prompt, push=ticket)
        finished(prefill)
        (result,) = finished(decode)
        monkeypatch.undo()
    assert result.tokens == stock("llama", tuple(prompt))[0]
    assert result.loaded_tokens == 0


def _spoil(target, ticket):
    next(iter(target.values()))[ticket.blocks[0][0], 3] += 1.0


def _after(spoil, target, ticket, decode):
    handle = decode.pushes.node.target.handle

    def handled(peer, message):
        if getattr(message, "layer", None) == 2:
            spoil(target, ticket)
        handle(peer, message)

    return handled


def test_other_weights_are_refused_by_name_before_a_byte_moves(models):
    prompt = prompt_of(37)
    with pair(models("llama"), other=tiny_model("llama", seed=1)) as (prefill, decode):
        ticket = decode.offer(prompt, LONG)
        with pytest.raises(LayoutMismatch, match="weights_version"):
            prefill.submit(prompt, push=ticket)
        decode.abort(ticket.request)


def test_offers_that_can_not_be_are_refused_and_leave_nothing(models):
    prompt = prompt_of(37)
    with pair(models("llama"), blocks=4) as (prefill, decode):
        with pytest.raises(Refused, match="one token"):
            decode.offer([5])
        ticket = decode.offer(prompt, Params(max_tokens=2))
        with pytest.raises(Full, match="no room"):
            decode.offer(prompt, Params(max_tokens=2))
        with pytest.raises(Refused, match="asks for 36 tokens"):
            prefill.submit(prompt[:-1], push=ticket)
        decode.abort(ticket.request)
    with pooled_engine(models("llama")) as engine, pytest.raises(Refused, match="no transport"):
        engine.offer(prompt)
