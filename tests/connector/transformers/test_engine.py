import pytest
import torch
from small_engines import NoPool, assert_no_block_lost, bare_engine, pooled_engine, prompt_of

from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.engine import Engine, EngineSettings
from layercast.connector.transformers.requests import Finish, Params
from layercast.errors import BadSetting, DeadlineExceeded, Refused, UnsupportedModel
from layercast.move.cpu import CpuMover
from layercast.move.flights import HostFlight

FAMILIES = ["llama", "qwen3", "gemma3", "deepseek_v3", "gpt_oss", "granite4", "qwen3_next", "falcon_h1", "bamba"]
LENGTHS = (100, 37, 1, 15, 16, 17)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_answers_as_plain_transformers_does_one_by_one(models, stock, family):
    prompts = [prompt_of(length) for length in LENGTHS]
    with bare_engine(models(family)) as engine:
        results = engine.generate(prompts, Params(max_tokens=20, logits=True))
    for prompt, result in zip(prompts, results, strict=True):
        tokens, logits = stock(family, tuple(prompt))
        assert result.tokens == tokens
        assert (result.logits - logits).abs().max() < 2e-4
        assert (result.prompt_tokens, result.computed_tokens, result.loaded_tokens) == (len(prompt), len(prompt), 0)
        assert result.finish is Finish.LENGTH
        assert result.recomputed_tokens == result.preemptions == 0


@pytest.mark.parametrize("chunk_blocks", [1, 2, 5, 32])
@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_chunks_of_any_size_give_the_same_answer(models, stock, family, chunk_blocks):
    prompt = prompt_of(100)
    with bare_engine(models(family), chunk_blocks=chunk_blocks) as engine:
        (result,) = engine.generate([prompt], Params(max_tokens=20))
    assert result.tokens == stock(family, tuple(prompt))[0]


@pytest.mark.parametrize("block_size", [1, 7, 64])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_blocks_of_any_size_give_the_same_answer(models, stock, family, block_size):
    prompt = prompt_of(37)
    sizes = {"block_size": block_size, "state_block": 4 * block_size, "blocks": 80}
    with bare_engine(models(family), **sizes) as engine:
        (result,) = engine.generate([prompt], Params(max_tokens=20))
    assert result.tokens == stock(family, tuple(prompt))[0]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_memory_that_is_block_major_gives_the_same_answer(models, stock, family):
    prompt = prompt_of(37)
    with bare_engine(models(family), block_major=True) as engine:
        (result,) = engine.generate([prompt], Params(max_tokens=20))
    assert result.tokens == stock(family, tuple(prompt))[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "granite4", "qwen3_next"])
def test_half_precision_runs_and_its_logits_are_finite(models, family, dtype):
    with bare_engine(models(family, dtype)) as engine:
        (result,) = engine.generate([prompt_of(70)], Params(max_tokens=4, logits=True))
    assert len(result.tokens) == 4
    assert result.logits.isfinite().all()


def test_sampling_depends_on_the_seed_and_not_on_the_batch(models):
    prompts = [prompt_of(20, seed) for seed in range(4)]
    params = [Params(max_tokens=12, temperature=1.0, top_p=0.9, seed=seed) for seed in range(4)]
    with bare_engine(models("llama")) as engine:
        together = engine.generate(prompts, params)
        alone = [engine.generate([prompt], how)[0] for prompt, how in zip(prompts, params, strict=True)]
        (other,) = engine.generate(prompts[:1], Params(max_tokens=12, temperature=1.0, top_p=0.9, seed=99))
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert other.tokens != together[0].tokens


def test_a_tiny_nucleus_is_greedy(models, stock):
    prompt = prompt_of(37)
    with bare_engine(models("llama")) as engine:
        (result,) = engine.generate([prompt], Params(max_tokens=20, temperature=2.0, top_p=1e-6))
    assert result.tokens == stock("llama", tuple(prompt))[0]


def test_an_answer_ends_with_its_first_stop_token(models, stock):
    prompt = prompt_of(37)
    tokens = stock("llama", tuple(prompt))[0]
    with bare_engine(models("llama")) as engine:
        (result,) = engine.generate([prompt], Params(max_tokens=20, stop=(tokens[5],)))
    assert result.tokens == tokens[: tokens.index(tokens[5]) + 1]
    assert result.finish is Finish.STOP


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_requests_that_outgrow_the_blocks_are_preempted_and_still_answer_right(models, stock, family):
    prompts = [prompt_of(length) for length in (37, 38, 39, 40)]
    with bare_engine(models(family), blocks=10) as engine:
        results = engine.generate(prompts, Params(max_tokens=20))
    assert sum(result.preemptions for result in results) > 0
    assert results[0].preemptions == 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == stock(family, tuple(prompt))[0]
        assert result.computed_tokens == len(prompt)
        assert (result.recomputed_tokens > 0) == (result.preemptions > 0)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_an_aborted_request_gives_back_every_block_and_the_others_go_on(models, stock, family, steps):
    prompts = [prompt_of(length) for length in (70, 37)]
    with bare_engine(models(family)) as engine:
        first, second = (engine.submit(prompt, Params(max_tokens=20)) for prompt in prompts)
        outputs = [output for _ in range(steps) for output in engine.step()]
        result = engine.abort(first)
        assert_no_block_lost(engine)
        while not engine.idle:
            outputs += engine.step()
    assert result.finish is Finish.ABORTED
    assert result.tokens == tuple(output.token for output in outputs if output.request == first)
    (answer,) = [output.result for output in outputs if output.request == second and output.result]
    assert answer.tokens == stock(family, tuple(prompts[1]))[0]


def test_a_forward_that_raises_ends_its_requests_and_gives_back_their_blocks(models, monkeypatch, stock):
    model, prompt = models("llama"), prompt_of(37)
    with bare_engine(model) as engine:
        engine.submit(prompt)
        monkeypatch.setattr(model.model.layers[2].mlp, "forward", _broken)
        with pytest.raises(ArithmeticError):
            engine.step()
        monkeypatch.undo()
        assert engine.idle
        (result,) = engine.generate([prompt], Params(max_tokens=20))
    assert result.tokens == stock("llama", tuple(prompt))[0]


def _broken(*_):
    raise ArithmeticError("this layer is broken")


def test_more_requests_than_the_batch_holds_are_all_answered(models, stock):
    prompts = [prompt_of(20, seed) for seed in range(5)]
    with bare_engine(models("llama"), max_batch=2) as engine:
        results = engine.generate(prompts, Params(max_tokens=20))
    assert [result.tokens for result in results] == [stock("llama", tuple(prompt))[0] for prompt in prompts]


def test_a_prompt_longer_than_the_memory_is_refused_with_both_numbers(models):
    with bare_engine(models("llama"), blocks=4) as engine, pytest.raises(Refused, match=r"65 tokens.*5 blocks.*has 4"):
        engine.submit(prompt_of(60), Params(max_tokens=6))


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite4"])
def test_a_prompt_that_just_fits_the_memory_is_answered(models, family):
    with bare_engine(models(family), blocks=4) as engine:
        (result,) = engine.generate([prompt_of(60)], Params(max_tokens=5))
    assert len(result.tokens) == 5


@pytest.mark.parametrize(("prompt", "reason"), [([], "empty"), ([512], "outside 0..511"), ([-1], "outside 0..511")])
def test_prompts_that_are_no_prompts_are_refused(models, prompt, reason):
    with bare_engine(models("llama")) as engine, pytest.raises(Refused, match=reason):
        engine.submit(prompt)


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_params_that_mean_nothing_are_refused(bad):
    with pytest.raises(Refused, match=next(iter(bad))):
        Params(**bad)


@pytest.mark.parametrize("bad", [{"block_size": 0}, {"state_block": 24}])
def test_settings_that_mean_nothing_are_refused(bad):
    with pytest.raises(BadSetting, match=next(iter(bad))):
        EngineSettings(**bad)


def test_prompts_of_which_one_is_refused_leave_nothing_queued(models):
    with bare_engine(models("llama")) as engine, pytest.raises(Refused):
        engine.generate([prompt_of(5), []])


class BrakedMover(CpuMover):
    """Moves nothing before its brake is let go."""

    brake = HostFlight()

    def submit(self, pieces, *, after=(), keep=()):
        return super().submit(pieces, after=(*after, self.brake), keep=keep)


def test_answers_that_copies_without_end_leave_no_blocks_for_are_given_up_at_the_deadline(models, monkeypatch):
    monkeypatch.setattr("layercast.control.memory.CpuMover", BrakedMover)
    monkeypatch.setattr("layercast.connector.transformers.engine.REPORT_WAIT_S", 0.05)
    with pooled_engine(models("llama"), blocks=4, stall_s=0.2) as engine:
        engine.generate([prompt_of(60)], Params(max_tokens=1))
        with pytest.raises(DeadlineExceeded, match=r"no forward could run for 0\.2 s.*raise blocks"):
            engine.generate([prompt_of(60, seed=2)], Params(max_tokens=1))
        assert not engine._live
        BrakedMover.brake.land()
        (result,) = engine.generate([prompt_of(60, seed=2)], Params(max_tokens=1))
    assert len(result.tokens) == 1


def test_an_abort_of_nothing_is_refused(models):
    with bare_engine(models("llama")) as engine, pytest.raises(Refused, match="not under way"):
        engine.abort("request-7")


def test_mamba_1_is_refused_before_any_memory_is_taken(models):
    with pytest.raises(UnsupportedModel, match="Mamba-1"):
        Engine(models("jamba"), lambda layout: NoPool())


@pytest.mark.parametrize(
    ("prompts", "pass_this"),
    [
        (["text"], r"tokenizer\(text\)\['input_ids'\]"),
        ("text", r"\['input_ids'\]"),
        ([1, 2, 3], r"pass \[ids\]"),
        ([{"input_ids": [1, 2]}], r"\['input_ids'\]"),
        (torch.ones(1, 4, dtype=torch.int64), r"\.tolist\(\)"),
        ([[[1, 2]]], "one list for each prompt"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused_with_what_to_pass(models, prompts, pass_this):
    with bare_engine(models("llama")) as engine:
        with pytest.raises(Refused, match=pass_this):
            engine.generate(prompts)
        assert engine.idle


def test_an_engine_of_a_name_is_refused_with_what_to_pass():
    with pytest.raises(Refused, match=r"not 'gpt2': AutoModelForCausalLM\.from_pretrained"), open_engine("gpt2"):
        pass
