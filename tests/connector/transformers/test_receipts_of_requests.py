"""Every request ends with a receipt that says what was loaded, or why nothing was."""

import pytest
from small_engines import flip, pooled_engine, prompt_of
from test_pushes import finished, pair

from layercast.connector.transformers.requests import Params
from layercast.errors import PeerLost
from layercast.observe.receipts import MissReason
from layercast.spec.keys import Extra, ExtraKind
from layercast.spec.planes import PlaneKind

PROMPT = prompt_of(70)


def answered(engine, prompt=PROMPT, **params):
    (result,) = engine.generate([prompt], Params(max_tokens=1, **params))
    engine.drain(10)
    return result.receipt


def test_a_hit_says_how_many_bytes_of_how_many_layers_came_from_where(models):
    with pooled_engine(models("llama")) as engine:
        assert answered(engine).miss is MissReason.NEVER_STORED
        receipt = answered(engine)
    assert (receipt.miss, receipt.loaded_tokens, receipt.computed_tokens) == (None, 64, 6)
    assert receipt.nbytes == 4 * 4 * 16 * 2 * 2 * 16 * 4  # layers, blocks, tokens, K and V, heads, width, float32
    assert (receipt.layers, receipt.tier, receipt.window, receipt.verified) == (4, "host", 1, True)
    assert receipt.exposed_s >= 0
    assert 0 < receipt.transfer_s < 10
    assert "64 loaded from host (65,536 bytes, 4 layers" in receipt.sentence


def test_a_paced_load_is_mostly_exposed_and_says_so(models):
    """Four layers of 16 KiB over 1.6 Mbit/s: 80 ms a layer, against milliseconds of compute."""
    with pooled_engine(models("llama"), link_gbps=0.0016) as engine:
        answered(engine)
        receipt = answered(engine)
    assert 0.32 <= receipt.transfer_s < 3
    assert 0.5 * receipt.transfer_s < receipt.exposed_s <= 1.1 * receipt.transfer_s
    assert receipt.overlap < 0.5


def test_every_miss_says_why(models, monkeypatch):
    """LMCache#3659: "tell me why it missed"."""

    def broken(*_, **__):
        raise PeerLost("the cable is out")

    with pooled_engine(models("llama")) as engine:
        assert answered(engine, PROMPT[:9]).miss is MissReason.SHORT
        assert answered(engine, extras={0: [Extra(ExtraKind.SALT, b"")]}).miss is MissReason.NOT_CACHEABLE
        assert answered(engine).miss is MissReason.NEVER_STORED
        assert answered(engine, load=False).miss is MissReason.DECLINED
        flip(engine, PROMPT, 2, PlaneKind.VALUE)
        damaged = answered(engine)
        assert (damaged.miss, damaged.loaded_tokens, damaged.verified) == (MissReason.CORRUPT, 0, False)
        assert "layers (2,)" in damaged.sentence
        with monkeypatch.context() as patch:
            patch.setattr(engine.pool.worker.mover, "submit", broken)
            lost = answered(engine)
        assert (lost.miss, lost.detail) == (MissReason.LOST, "the cable is out")
        match = engine.pool.match

        def gone(*args, **how):
            found = match(*args, **how)
            engine.pool.directory.forget(0, found.keys[0])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(engine.pool, "match", gone)
            assert answered(engine).miss is MissReason.LOST
    with pooled_engine(models("llama"), {"kv_recompute_threshold": 65}) as engine:
        answered(engine)
        assert answered(engine).miss is MissReason.BELOW_THRESHOLD
    with pooled_engine(models("llama"), {"layer_wait_ms": 1}, link_gbps=0.002) as engine:
        answered(engine)
        assert answered(engine).miss in (MissReason.TIMED_OUT, MissReason.LOST)


def test_a_pushed_prompt_says_that_it_came_from_a_peer(models):
    with pair(models("llama")) as (prefill, decode):
        prefill.submit(PROMPT, push=decode.offer(PROMPT, Params(max_tokens=2)))
        finished(prefill)
        (result,) = finished(decode)
    receipt = result.receipt
    assert (receipt.tier, receipt.loaded_tokens, receipt.computed_tokens) == ("peer", 69, 1)
    assert (receipt.layers, receipt.verified, receipt.miss) == (4, True, None)
    assert receipt.nbytes == 4 * 5 * 16 * 2 * 2 * 16 * 4  # the last block of the 69 tokens goes as a whole


@pytest.mark.parametrize(("sender", "receiver"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_push_is_called_verified_exactly_if_the_receiver_checks(models, sender, receiver):
    with pair(models("llama"), config={"verify": sender}, other_config={"verify": receiver}) as (prefill, decode):
        prefill.submit(PROMPT, push=decode.offer(PROMPT, Params(max_tokens=2)))
        finished(prefill)
        (result,) = finished(decode)
    assert result.receipt.loaded_tokens == 69
    assert result.receipt.verified is receiver


@pytest.mark.parametrize("family", ["gemma3", "granite4"])
def test_bytes_of_a_receipt_are_those_of_the_blocks_that_are_needed(models, family):
    """A window's tail and one snapshot, not the whole prompt."""
    prompt = prompt_of(150)
    with pooled_engine(models(family)) as engine:
        answered(engine, prompt)
        needed = engine.pool.match(prompt).needed
        receipt = answered(engine, prompt)
        groups = engine.memory.layout.groups
    assert receipt.nbytes == sum(len(n) * group.block_bytes for n, group in zip(needed, groups, strict=True))
