import pytest
import torch
from small_engines import assert_no_block_lost, flip, pooled_engine, prompt_of
from tiny_models import tiny_model

from layercast.connector.transformers.embedded import weights_digest
from layercast.connector.transformers.requests import Params
from layercast.errors import DeadlineExceeded
from layercast.flow.orders import LoadEnd, LoadOutcome, SaveOutcome
from layercast.spec.groups import GroupKind
from layercast.spec.planes import PlaneKind

FAMILIES = ["llama", "qwen3", "gemma3", "deepseek_v3", "gpt_oss", "granite4", "qwen3_next", "falcon_h1"]
BULK, LAYERWISE = {"use_layerwise": False}, {"use_layerwise": True}
LONG = Params(max_tokens=20, logits=True)


def hit(engine, tokens):
    """Tokens that a prompt of so many finds if all of it was saved: whole blocks, or snapshots, below its last one."""
    recurrent = any(spec.kind is GroupKind.RECURRENT for spec in engine.memory.specs)
    size = engine.settings.state_block if recurrent else engine.settings.block_size
    return (tokens - 1) // size * size


@pytest.mark.parametrize("config", [BULK, LAYERWISE], ids=["bulk", "layerwise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_prompt_answers_as_a_cold_one_and_computes_only_the_uncached_tokens(models, stock, family, config):
    prompt = prompt_of(150)
    with pooled_engine(models(family), config, block_major=config is BULK) as engine:
        (cold,) = engine.generate([prompt], LONG)
        engine.drain(10)
        (warm,) = engine.generate([prompt], LONG)
        assert (cold.computed_tokens, cold.loaded_tokens) == (150, 0)
        assert (warm.computed_tokens, warm.loaded_tokens) == (150 - hit(engine, 150), hit(engine, 150))
        assert warm.recomputed_tokens == 0
        (load,) = [outcome for outcome in warm.receipts if isinstance(outcome, LoadOutcome)]
        assert (load.end, load.verified) == (LoadEnd.LANDED, True)
        assert load.layers == len(engine.memory.layout.layers)
    assert warm.tokens == cold.tokens == stock(family, tuple(prompt))[0]
    assert (warm.logits - cold.logits).abs().max() < 2e-4


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_around_a_block_boundary_a_hit_is_whole_blocks_below_the_last_token(models, stock, length):
    prompt = prompt_of(length)
    with pooled_engine(models("llama")) as engine:
        engine.generate([prompt], LONG)
        engine.drain(10)
        (warm,) = engine.generate([prompt], LONG)
    assert warm.loaded_tokens == (length - 1) // 16 * 16
    assert warm.computed_tokens == length - warm.loaded_tokens
    assert warm.tokens == stock("llama", tuple(prompt))[0]


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_the_second_turn_of_a_chat_finds_the_prompt_and_the_answer(models, stock, family):
    prompt = prompt_of(125)
    with pooled_engine(models(family)) as engine:
        (first,) = engine.generate([prompt], Params(max_tokens=20))
        engine.drain(10)
        turn = [*prompt, *first.tokens, *prompt_of(30, seed=2)]
        (second,) = engine.generate([turn], Params(max_tokens=20))
        assert second.loaded_tokens == hit(engine, 145) > len(prompt)
    assert second.tokens == stock(family, tuple(turn))[0]


def test_what_is_generated_is_not_saved_where_the_settings_say_so(models):
    prompt = prompt_of(125)
    with pooled_engine(models("llama"), {"save_decode_cache": False}) as engine:
        (first,) = engine.generate([prompt], Params(max_tokens=20))
        engine.drain(10)
        (second,) = engine.generate([[*prompt, *first.tokens, 5]], Params(max_tokens=1))
        assert second.loaded_tokens == 112


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_any_chunking_saves_the_same_keys(models, family):
    prompt, saved = prompt_of(150), set()
    for chunk_blocks in (1, 3, 32):
        with pooled_engine(models(family), chunk_blocks=chunk_blocks) as engine:
            engine.generate([prompt], Params(max_tokens=1))
            engine.drain(10)
            keys = engine.pool.match(prompt).keys
            held = [engine.pool.directory.present(group, named) for group, named in enumerate(keys)]
            saved.add(
                tuple(key for named, here in zip(keys, held, strict=True) for key in zip(named, here, strict=True))
            )
    assert len(saved) == 1


def test_requests_that_share_part_of_their_prefix_load_that_part(models, stock):
    shared = prompt_of(64)
    prompts = [shared + prompt_of(20, seed) for seed in (5, 6)] + [shared[:32] + prompt_of(40, 7)]
    with pooled_engine(models("llama")) as engine:
        engine.generate([[*shared, 9]], Params(max_tokens=1))
        engine.drain(10)
        results = engine.generate(prompts, Params(max_tokens=20))
    assert [result.loaded_tokens for result in results] == [64, 64, 32]
    assert [result.tokens for result in results] == [stock("llama", tuple(prompt))[0] for prompt in prompts]


class CountedStep:
    """A step that notes its calls, in order."""

    def __init__(self, step, calls):
        self._step, self._calls = step, calls

    def wait(self, layer):
        self._calls.append(("wait", layer))
        self._step.wait(layer)

    def written(self, layer):
        self._calls.append(("written", layer))
        self._step.written(layer)

    def end(self):
        return self._step.end()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_forward_waits_for_every_layer_once_and_hands_every_layer_off_once(models, monkeypatch, family):
    """Cold, warm, in a batch: the calls are a constant of the model, and a layer is gated before it is written."""
    prompt, forwards = prompt_of(150), []
    with pooled_engine(models(family)) as engine:
        begin = engine.pool.begin

        def counted(orders):
            forwards.append([])
            return CountedStep(begin(orders), forwards[-1])

        monkeypatch.setattr(engine.pool, "begin", counted)
        for _ in range(2):
            results = engine.generate([prompt, prompt[:40]], Params(max_tokens=4))
            engine.drain(10)
        layers = list(engine.memory.layout.layers)
    assert results[0].loaded_tokens > 0
    for calls in forwards:
        assert [layer for call, layer in calls if call == "wait"] == layers
        assert sorted(layer for call, layer in calls if call == "written") == layers
        assert all(calls.index(("wait", layer)) < calls.index(("written", layer)) for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "granite4", "qwen3_next"])
def test_half_precision_loads_what_it_saved(models, family, dtype):
    """Chunks other than the cold ones round otherwise, so logits agree to a few units in the last place only."""
    prompt = prompt_of(150)
    with pooled_engine(models(family, dtype)) as engine:
        (cold,) = engine.generate([prompt], Params(max_tokens=1, logits=True))
        engine.drain(10)
        (warm,) = engine.generate([prompt], Params(max_tokens=1, logits=True))
    assert warm.loaded_tokens >= 128
    assert (warm.logits - cold.logits).abs().max() < 0.06 * cold.logits.abs().max()


CUTS = [
    ("llama", layer, kind, config)
    for config in (BULK, LAYERWISE)
    for layer in range(4)
    for kind in (PlaneKind.KEY, PlaneKind.VALUE)
]
CUTS += [("deepseek_v3", 2, kind, LAYERWISE) for kind in (PlaneKind.LATENT, PlaneKind.ROPE)]
CUTS += [("gemma3", 1, PlaneKind.VALUE, LAYERWISE), ("gemma3", 5, PlaneKind.KEY, LAYERWISE)]
CUTS += [("granite4", layer, kind, LAYERWISE) for layer in (0, 3) for kind in (PlaneKind.CONV, PlaneKind.STATE)]


@pytest.mark.parametrize(("family", "layer", "kind", "config"), CUTS)
def test_a_flipped_bit_in_any_layer_is_caught_and_everything_recomputed(models, stock, family, layer, kind, config):
    prompt = prompt_of(150)
    with pooled_engine(models(family), config) as engine:
        engine.generate([prompt], Params(max_tokens=1))
        engine.drain(10)
        promised = hit(engine, 150)
        flip(engine, prompt, layer, kind)
        (result,) = engine.generate([prompt], Params(max_tokens=20))
        engine.drain(10)
        assert (result.computed_tokens, result.loaded_tokens, result.recomputed_tokens) == (150, 0, promised)
    assert result.tokens == stock(family, tuple(prompt))[0]


@pytest.mark.parametrize("kind", [PlaneKind.KEY, PlaneKind.VALUE])
@pytest.mark.parametrize("layer", range(4))
def test_without_checks_a_flipped_bit_changes_the_logits(models, layer, kind):
    """The control of the test above: what it flips is read."""
    prompt = prompt_of(150)
    with pooled_engine(models("llama"), {"verify": False}) as engine:
        (cold,) = engine.generate([prompt], Params(max_tokens=1, logits=True))
        engine.drain(10)
        flip(engine, prompt, layer, kind)
        (warm,) = engine.generate([prompt], Params(max_tokens=1, logits=True))
    assert warm.loaded_tokens == 144
    assert not (warm.logits - cold.logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_an_abort_in_flight_leaves_nothing_behind_and_the_pool_right(models, stock, family, steps):
    prompt = prompt_of(150)
    with pooled_engine(models(family)) as engine:
        engine.generate([prompt[:120]], Params(max_tokens=1))
        engine.drain(10)
        request = engine.submit(prompt, Params(max_tokens=20))
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        assert_no_block_lost(engine)
        (result,) = engine.generate([prompt], Params(max_tokens=20))
    assert result.tokens == stock(family, tuple(prompt))[0]


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_a_preempted_request_finds_its_own_saved_blocks(models, stock, family):
    prompts = [prompt_of(70, seed) for seed in range(3)]
    with pooled_engine(models(family), blocks=14) as engine:
        results = engine.generate(prompts, Params(max_tokens=20))
    assert sum(result.preemptions for result in results) > 0
    assert [result.tokens for result in results] == [stock(family, tuple(prompt))[0] for prompt in prompts]
    assert all(result.computed_tokens + result.loaded_tokens == 70 for result in results)
    # Without the pool each preemption would run the whole prompt again.
    assert all(result.recomputed_tokens < 32 + 16 * result.preemptions + 64 for result in results)


def test_a_request_that_may_not_load_or_save_does_neither(models):
    prompt = prompt_of(50)
    with pooled_engine(models("llama")) as engine:
        (unsaved,) = engine.generate([prompt], Params(save=False))
        engine.drain(10)
        (cold,) = engine.generate([prompt], Params())
        engine.drain(10)
        (unloaded,) = engine.generate([prompt], Params(load=False))
    assert (unsaved.loaded_tokens, cold.loaded_tokens, unloaded.loaded_tokens) == (0, 0, 0)
    assert not unsaved.receipts
    assert any(isinstance(outcome, SaveOutcome) for outcome in cold.receipts)


def test_a_forward_that_raises_saves_nothing(models, monkeypatch):
    model, prompt = models("llama"), prompt_of(50)
    with pooled_engine(model) as engine:
        engine.submit(prompt)
        monkeypatch.setattr(model.model.layers[2].mlp, "forward", _broken)
        with pytest.raises(ArithmeticError):
            engine.step()
        monkeypatch.undo()
        engine.drain(10)
        assert engine.pool.match(prompt).tokens == 0


def _broken(*_):
    raise ArithmeticError("this layer is broken")


def test_a_slab_too_small_for_a_prompt_saves_what_it_can_and_never_harms_the_answer(models, stock):
    prompt = prompt_of(150)
    with pooled_engine(models("llama"), {"host_bytes": 100_000}) as engine:
        for _ in range(2):
            (result,) = engine.generate([prompt], Params(max_tokens=20))
            assert result.tokens == stock("llama", tuple(prompt))[0]


def test_copies_slower_than_one_wait_are_drained_within_the_deadline_given(models, monkeypatch):
    monkeypatch.setattr("layercast.connector.transformers.engine.REPORT_WAIT_S", 0.02)
    with pooled_engine(models("llama"), link_gbps=0.004) as engine:
        engine.generate([prompt_of(150)], Params(max_tokens=1))
        with pytest.raises(DeadlineExceeded, match="copies"):
            engine.drain(0.01)
        engine.drain(10)
        assert engine.pool.match(prompt_of(150)).tokens == 144


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_a_load_that_is_late_is_recomputed_and_its_blocks_stay_held_until_it_has_landed(models, stock, family):
    prompt = prompt_of(150)
    with pooled_engine(models(family), {"layer_wait_ms": 1}, link_gbps=0.002) as engine:
        engine.generate([prompt], Params(max_tokens=1))
        engine.drain(10)
        request = engine.submit(prompt, Params(max_tokens=20))
        engine.step()
        assert engine.space.held > 0
        assert_no_block_lost(engine)
        results = []
        while not results:
            results = [output.result for output in engine.step() if output.result]
    assert results[0].request == request
    assert results[0].tokens == stock(family, tuple(prompt))[0]
    assert (results[0].computed_tokens, results[0].loaded_tokens) == (150, 0)


def test_other_weights_have_other_names(models):
    assert weights_digest(models("llama")) == weights_digest(tiny_model("llama"))
    assert weights_digest(models("llama")) != weights_digest(tiny_model("llama", seed=1))
