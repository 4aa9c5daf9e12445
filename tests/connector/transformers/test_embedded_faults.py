"""The embedded engine when the pool's bytes are damaged, lost, late or no numbers at all."""

import time

import pytest
from small_engines import assert_no_block_lost, flip, pooled_engine, prompt_of
from tiny_models import tiny_model

from layercast.connector.transformers.requests import Params
from layercast.errors import OutOfMemory, PeerLost
from layercast.flow.orders import LoadEnd, LoadOutcome

FAMILIES = ["llama", "qwen3", "gemma3", "deepseek_v3", "gpt_oss", "granite4", "qwen3_next", "falcon_h1"]
ONE = Params(max_tokens=1, logits=True)


def planes_of(engine):
    """(layer, kind) of every plane that the engine has registered."""
    return [(plane.layer, plane.kind) for group in engine.memory.layout.groups for plane in group.planes]


def warmed(engine, prompt):
    """Answer a prompt, and let its KV come to the pool."""
    (result,) = engine.generate([prompt], ONE)
    engine.drain(10)
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_a_flipped_bit_in_any_plane_of_any_layer_is_caught_and_everything_recomputed(models, family):
    prompt = prompt_of(65)
    with pooled_engine(models(family)) as engine:
        cold = warmed(engine, prompt)
        for layer, kind in planes_of(engine):
            flip(engine, prompt, layer, kind)
            result = warmed(engine, prompt)
            (load,) = [outcome for outcome in result.receipts if isinstance(outcome, LoadOutcome)]
            assert (load.end, load.verified) == (LoadEnd.CORRUPT, False), (layer, kind)
            assert (result.computed_tokens, result.loaded_tokens, result.recomputed_tokens) == (65, 0, 64)
            assert (result.logits - cold.logits).abs().max() < 2e-4
        assert warmed(engine, prompt).loaded_tokens == 64, "what was recomputed is saved again"


@pytest.mark.parametrize("family", FAMILIES)
def test_without_checks_a_flipped_bit_in_any_plane_of_any_layer_changes_the_logits(models, family):
    """The control of the test above: everything it flips is read, by the one token that is left to compute."""
    prompt = prompt_of(65)
    with pooled_engine(models(family), {"verify": False}) as engine:
        cold = warmed(engine, prompt)
        for layer, kind in planes_of(engine):
            flip(engine, prompt, layer, kind)
            warm = warmed(engine, prompt)
            flip(engine, prompt, layer, kind)
            assert warm.loaded_tokens == 64
            assert not (warm.logits - cold.logits).abs().max() < 1e-4, (layer, kind)
        assert (warmed(engine, prompt).logits - cold.logits).abs().max() < 2e-4, "every bit is back"


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "granite4", "qwen3_next"])
def test_nan_in_one_requests_kv_stays_in_that_request(models, stock, family):
    """In the same batch, and in those who get its blocks and its place in the pool afterwards."""
    sick, healthy = prompt_of(70, seed=1), [prompt_of(50, seed=2), prompt_of(90, seed=3)]
    settings = {"poison": False, "blocks": 20}  # freed blocks keep their NaN
    with pooled_engine(models(family), {"verify": False}, **settings) as engine:
        warmed(engine, sick)
        slab = engine.pool.worker.ways.slab
        for group, owner in enumerate(slab.layout.groups):
            for layer in owner.layers:
                for slot in range(owner.blocks):
                    slab.write(group, slot, layer, b"\xff" * owner.layer_bytes(layer))
        params = [Params(max_tokens=20, logits=True), *[Params(max_tokens=20)] * 2]
        results = engine.generate([sick, *healthy], params)
        assert results[0].loaded_tokens == 64
        assert results[0].logits.isnan().all()
        assert [result.tokens for result in results[1:]] == [stock(family, tuple(p))[0] for p in healthy]
        engine.drain(10)
        again = engine.generate(healthy, Params(max_tokens=20))
        assert [result.tokens for result in again] == [stock(family, tuple(p))[0] for p in healthy]


class CountedStep:
    """A step that notes its calls."""

    def __init__(self, step, calls):
        self._step, self._calls = step, calls

    def wait(self, layer):
        self._calls.append(("wait", layer))
        self._step.wait(layer)

    def written(self, layer):
        self._calls.append(("written", layer))
        self._step.written(layer)

    def end(self):
        self._calls.append(("end", None))
        return self._step.end()


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_a_forward_makes_the_same_calls_whether_it_hits_misses_loses_its_bytes_or_the_mover_is_broken(
    models, stock, monkeypatch, family
):
    prompt, forwards = prompt_of(150), []
    with pooled_engine(models(family)) as engine:
        begin, match = engine.pool.begin, engine.pool.match

        def counted(orders):
            forwards.append([])
            return CountedStep(begin(orders), forwards[-1])

        def gone(*args, **how):
            """A match whose blocks are lost before they are leased."""
            found = match(*args, **how)
            for group, keys in enumerate(found.keys):
                engine.pool.directory.forget(group, keys)
            return found

        def broken(*_, **__):
            raise PeerLost("the link broke")

        def answer():
            (result,) = engine.generate([prompt], Params(max_tokens=20))
            engine.drain(10)
            assert result.tokens == stock(family, tuple(prompt))[0]
            return result

        monkeypatch.setattr(engine.pool, "begin", counted)
        assert answer().loaded_tokens == 0
        assert answer().loaded_tokens > 0
        with monkeypatch.context() as patch:
            patch.setattr(engine.pool.worker.mover, "submit", broken)
            unhealthy = answer()
            assert unhealthy.recomputed_tokens > 0
            assert {r.end for r in unhealthy.receipts if isinstance(r, LoadOutcome)} == {LoadEnd.LOST}
        assert answer().loaded_tokens > 0
        flip(engine, prompt, *planes_of(engine)[0])
        assert answer().recomputed_tokens > 0
        with monkeypatch.context() as patch:
            patch.setattr(engine.pool, "match", gone)
            assert answer().loaded_tokens == 0
        layers = list(engine.memory.layout.layers)
    assert len(forwards) > 6 * 20
    for calls in forwards:
        assert [layer for call, layer in calls if call == "wait"] == layers
        assert sorted(layer for call, layer in calls if call == "written") == layers
        assert calls[-1] == ("end", None)
        assert len(calls) == 2 * len(layers) + 1


def test_a_slab_larger_than_memory_is_refused_and_leaves_nothing_open():
    with (
        pytest.raises(OutOfMemory, match="lower host_bytes"),
        pooled_engine(tiny_model("llama"), {"host_bytes": 1 << 50}),
    ):
        raise AssertionError("opened")


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
@pytest.mark.parametrize("steps", [1, 3])
def test_an_abort_while_copies_crawl_leaves_their_blocks_alone_until_they_have_ended(models, stock, family, steps):
    prompt = prompt_of(150)
    with pooled_engine(models(family), {"layer_wait_ms": 5}, link_gbps=0.001) as engine:
        warmed(engine, prompt[:120])
        request = engine.submit(prompt, Params(max_tokens=20))
        for _ in range(steps):
            engine.step()
        assert engine.space.held > 0, "copies are in flight"
        engine.abort(request)
        assert_no_block_lost(engine)
        (result,) = engine.generate([prompt], Params(max_tokens=20, load=False))
    assert result.tokens == stock(family, tuple(prompt))[0]


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_preemption_while_saves_crawl_saves_each_request_under_its_own_name(models, stock, family):
    """Freed blocks are poisoned and handed to others: a save that read one late would be wrong when it is loaded."""
    prompts = [prompt_of(70, seed) for seed in range(3)]
    with pooled_engine(models(family), link_gbps=0.05, blocks=16) as engine:
        results = engine.generate(prompts, Params(max_tokens=20))
        assert sum(result.preemptions for result in results) > 0
        engine.drain(20)
        warm = [engine.generate([prompt], Params(max_tokens=20))[0] for prompt in prompts]
    assert [result.tokens for result in results] == [stock(family, tuple(prompt))[0] for prompt in prompts]
    assert [result.tokens for result in warm] == [stock(family, tuple(prompt))[0] for prompt in prompts]
    assert sum(result.loaded_tokens for result in warm) > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_prompts_of_one_batch_that_share_a_prefix_are_saved_and_found_by_all(models, stock, family):
    """Cold together, each saving what the others have not; then warm together, each loading its own part."""
    shared = prompt_of(64)
    prompts = [shared + prompt_of(80, 5), shared + prompt_of(70, 6), shared[:32] + prompt_of(100, 7), shared]
    with pooled_engine(models(family)) as engine:
        cold = engine.generate(prompts, Params(max_tokens=20))
        engine.drain(10)
        warm = engine.generate(prompts, Params(max_tokens=20))
    assert [result.tokens for result in cold] == [stock(family, tuple(prompt))[0] for prompt in prompts]
    assert [result.tokens for result in warm] == [result.tokens for result in cold]
    assert all(result.loaded_tokens >= 64 for result in warm[:3])
    assert all(result.computed_tokens + result.loaded_tokens == len(p) for result, p in zip(warm, prompts, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_a_slow_pool_is_saved_to_less_and_no_answer_waits_for_it(models, stock, family):
    """LMCache and vLLM#50031: where the tier was slow, copies piled up until serving went at its pace."""
    prompts = [prompt_of(100, seed) for seed in range(6)]
    with pooled_engine(models(family), link_gbps=0.002, blocks=64) as engine:
        for _ in range(3):
            requests = {engine.submit(prompt, Params(max_tokens=20, load=False)): prompt for prompt in prompts}
            answers, longest = {}, 0.0
            while len(answers) < len(prompts):
                began = time.monotonic()
                answers |= {output.request: output.result for output in engine.step() if output.result}
                longest = max(longest, time.monotonic() - began)
            assert all(answers[id].tokens == stock(family, tuple(prompt))[0] for id, prompt in requests.items())
            assert longest < 0.5, "a step waited for copies"
        engine.drain(30)
        (again,) = engine.generate(prompts[:1], Params(max_tokens=20))
    assert again.tokens == stock(family, tuple(prompts[0]))[0]


def test_blocks_that_were_not_saved_in_a_crowd_are_caught_up_with(models, monkeypatch):
    prompt = prompt_of(150)
    with pooled_engine(models("llama")) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.space), "crowded", True)
            request = engine.submit(prompt, Params(max_tokens=8))
            for _ in range(5):
                engine.step()
            assert engine.pool.match([*prompt, 0]).tokens == 0
        while not engine.idle:
            engine.step()
        assert request not in engine._live
        assert engine.pool.match([*prompt, 0]).tokens == 144
