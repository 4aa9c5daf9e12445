"""Real vLLM on the CPU, a tiny seeded Llama, one process: what comes out of the pool is what vLLM would have computed.

The engine runs in a process of its own (vLLM keeps global state); each test looks at one of its runs.
"""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LAYERS, BLOCK_BYTES = 4, 2 * 2 * 128 * 32 * 4 * 4  # K and V, heads, tokens, width, fp32, layers


@pytest.fixture(scope="module")
def facts(drive):
    return drive("vllm")


def same(run, reference, at=0):
    got, want = run["replies"][at], reference["replies"][0]
    assert got["tokens"] == want["tokens"]
    assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-4)


def test_a_cold_prompt_is_saved_chunk_by_chunk(facts):
    cold = facts["cold"]
    assert cold["scheduled"][:2] == [256, 44]
    assert cold["loads"] == []
    assert cold["saves"] == [[True, 2 * BLOCK_BYTES, LAYERS, 0]]
    assert cold["stored"] == 2


def test_a_warm_prompt_is_loaded_layer_by_layer_and_answers_the_same(facts):
    warm = facts["warm"]
    same(warm, facts["cold"])
    assert warm["replies"][0]["cached"] == 256
    assert warm["scheduled"] == [44] + [1] * 7
    assert warm["loads"] == [["landed", True, 2 * BLOCK_BYTES, LAYERS, 0]]
    assert warm["saves"] == []


@pytest.mark.parametrize("name", ["cold", "warm", "salted", "flipped", "forged"])
def test_every_layer_is_waited_for_and_handed_off_in_every_forward_for_which_something_moves(facts, name):
    """And calls no hook in others."""
    run = facts[name]
    assert run["layer_names"] == LAYERS
    assert run["waited"] == run["written"] == LAYERS * run["moving"]
    assert 0 < run["moving"] < len(run["scheduled"])


def test_blocks_that_vllm_holds_are_not_loaded_again(facts):
    assert facts["head"]["loads"] == [["landed", True, BLOCK_BYTES, LAYERS, 0]]
    run = facts["local_head"]
    same(run, facts["cold"])
    assert run["replies"][0]["cached"] == 256
    assert run["scheduled"][0] == 44
    assert run["loads"] == [["landed", True, BLOCK_BYTES, LAYERS, 0]]


def test_two_requests_of_one_step_are_loaded_side_by_side(facts):
    both = facts["both"]
    same(both, facts["cold"], 0)
    same(both, facts["other"], 1)
    assert both["scheduled"][0] == 88
    assert both["loads"] == [["landed", True, 2 * BLOCK_BYTES, LAYERS, 0]] * 2


def test_a_flipped_byte_is_caught_and_the_prompt_recomputed(facts):
    flipped = facts["flipped"]
    same(flipped, facts["cold"])
    ((end, verified, _, _, bad),) = flipped["loads"]
    assert (end, verified, bad) == ("corrupt", False, 1)
    assert flipped["scheduled"][:3] == [44, 256, 44]


def test_the_recomputed_block_takes_the_damaged_one_s_place(facts):
    assert facts["flipped"]["saves"] == [[True, BLOCK_BYTES, LAYERS, 0]]
    same(facts["mended"], facts["cold"])
    assert facts["mended"]["loads"] == [["landed", True, 2 * BLOCK_BYTES, LAYERS, 0]]


def test_the_answer_does_come_from_the_loaded_bytes(facts):
    """Another content with digests to match passes the check, so it must change the answer."""
    assert facts["forged"]["loads"][0][:2] == ["landed", True]
    assert facts["forged"]["replies"][0]["tokens"] != facts["cold"]["replies"][0]["tokens"]


def test_a_salted_prompt_finds_nothing_of_others(facts):
    same(facts["salted"], facts["cold"])
    assert facts["salted"]["replies"][0]["cached"] == 0
    assert facts["salted"]["loads"] == []


def test_nothing_is_left_behind(facts):
    runs = [value for value in facts.values() if isinstance(value, dict) and "replies" in value]
    assert len(runs) == 10
    assert [run["free_blocks"] for run in runs] == [facts["blocks"]] * len(runs)
    assert all(run["idle"] and run["requests"] == 0 for run in runs)
    assert facts["threads"] == []


def test_the_connector_is_known_by_name_and_keeps_full_graphs(facts):
    assert facts["by_name"]
    assert not facts["piecewise"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    assert EntryPoint("layercast", value, "vllm.general_plugins").load().__name__ == "register"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("setting", "UnknownSetting", "host_byte (did you mean host_bytes?); known: backend, discard_partial_chunks, "),
        ("pipeline", "UnsupportedModel", "pipeline parallelism"),
        ("groups", "UnsupportedModel", "caches of"),
    ],
)
def test_what_it_would_not_do_right_is_refused_with_the_reason(facts, name, kind, words):
    assert facts["refused"]["nothing"] == ""
    assert facts["refused"][name].startswith(kind)
    assert words in facts["refused"][name]
