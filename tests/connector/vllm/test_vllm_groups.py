"""Models of several cache groups in real vLLM: windows, recurrent states, latent KV, experts."""

import pytest

MODELS = {
    "gemma3": ["window", "window", "window", "full"],
    "granite4h": ["recurrent", "recurrent", "recurrent", "full"],
    "deepseek_v3": ["latent"],
    "qwen3_moe": ["full"],
    "gemma3_local": ["window", "window", "window", "full"],
    "gpt_oss": ["window", "full"],
}
QUICK, REST = list(MODELS)[:3], list(MODELS)[3:]
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]
EXACT = [name for name in NAMES if name != "deepseek_v3"]
"""vLLM's CPU prefill and decode of MLA disagree with one another, pool or not; there the bytes are compared."""


@pytest.fixture(scope="module")
def quick(drive):
    return drive("groups", *QUICK)


@pytest.fixture(scope="module")
def rest(drive):
    return drive("groups", *REST)


@pytest.fixture
def facts(request):
    def of(name):
        return request.getfixturevalue("quick" if name in QUICK else "rest")[name]

    return of


def same(run, reference):
    (got,), (want,) = run["replies"], reference["replies"]
    assert got["tokens"] == want["tokens"]
    assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-3)


def faults(run, kind):
    return [run[name] for name in run if name.startswith(f"{kind}_")]


@pytest.mark.parametrize("name", NAMES)
def test_every_group_is_registered_and_loaded(facts, name):
    run = facts(name)
    assert run["groups"] == MODELS[name]
    ((end, verified, nbytes, layers, _),) = run["warm"]["loads"]
    assert (end, verified, layers) == ("landed", True, run["layers"])
    assert nbytes > 0
    assert run["warm"]["replies"][0]["cached"] == 4 * run["size"]


@pytest.mark.parametrize("name", NAMES)
def test_loaded_blocks_hold_the_saved_bytes(facts, name):
    assert facts(name)["bytes"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_digests_of_vllm_tell_every_block_of_every_group_and_find_its_name(facts, name):
    assert facts(name)["digested"] == [True] * len(MODELS[name])
    assert facts(name)["named"]


@pytest.mark.parametrize("name", EXACT)
def test_a_loaded_prefix_answers_as_a_computed_one(facts, name):
    run = facts(name)
    same(run["warm"], run["cold"])


@pytest.mark.parametrize("name", EXACT)
def test_a_damaged_byte_of_any_group_is_recomputed_and_its_block_saved_again(facts, name):
    """By the answer that found it, or by the next one where the damage was known too late for that."""
    run = facts(name)
    assert len(faults(run, "flipped")) == len(faults(run, "mended")) == len(MODELS[name])
    assert len({tuple(mended["stored"]) for mended in faults(run, "mended")}) == 1, "nothing is missing in the end"
    for flipped, mended in zip(faults(run, "flipped"), faults(run, "mended"), strict=True):
        assert [load[0] for load in flipped["loads"]] == ["corrupt"]
        assert len(flipped["saves"]) + len(mended["saves"]) == 1
        assert [load[:2] for load in mended["loads"]] == [["landed", True]]
        same(flipped, run["cold"])
        same(mended, run["cold"])


@pytest.mark.parametrize("name", EXACT)
def test_other_bytes_give_another_answer(facts, name):
    """So the answers above do come from the loaded bytes."""
    run = facts(name)
    assert run["forged"]["loads"][0][:2] == ["landed", True]
    assert run["forged"]["replies"][0]["tokens"] != run["cold"]["replies"][0]["tokens"]


@pytest.mark.parametrize("name", EXACT)
def test_prompts_around_a_block_are_answered_as_by_an_engine_without_a_pool(facts, name):
    run = facts(name)
    assert [reply["tokens"] for reply in run["edges"]] == [reply["tokens"] for reply in run["plain_edges"]]


def test_a_prefix_shorter_than_the_saved_one_is_loaded_where_a_window_reaches(facts):
    run = facts("gemma3")
    assert run["shorter"]["replies"][0]["cached"] == 2 * run["size"]


def test_states_of_layers_without_hooks_are_swept_after_the_forward(facts):
    run = facts("granite4h")
    assert run["cold"]["saves"][0][2:] == [4, 3]
    assert run["zeroing"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left(facts, name):
    run = facts(name)
    assert run["drained"]["idle"]
    assert run["drained"]["free_blocks"] == run["blocks"]
    assert (run["drained"]["held"], run["drained"]["requests"], run["threads"]) == (0, 0, [])
