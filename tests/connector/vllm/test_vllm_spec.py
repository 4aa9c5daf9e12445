"""Speculative decoding in real vLLM: the same tokens, and drafts that are as good after a hit as after computing."""

import pytest

BLOCK = 32
METHODS = ["ngram", "draft", "eagle"]


@pytest.fixture(scope="module")
def facts(drive):
    return drive("spec")


def tokens(run):
    return run["replies"][0]["tokens"]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_those_of_an_engine_without_drafts(facts, name, number):
    run = facts[name]
    for kind in ("cold", "warm", "flipped"):
        assert tokens(run[f"{kind}_{number}"]) == facts["plain"][number], kind


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", METHODS)
def test_a_hit_is_loaded_with_the_layers_of_the_draft(facts, name, number):
    run = facts[name]
    ((end, verified, nbytes, layers, _),) = run[f"warm_{number}"]["loads"]
    assert (end, verified, layers) == ("landed", True, run["layers"])
    assert run[f"bytes_{number}"] == nbytes
    assert run["layers"] - run["target"] == {"ngram": 0, "draft": 4, "eagle": 1}[name]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", METHODS)
def test_drafts_are_accepted_after_a_hit_as_after_computing(facts, name, number):
    run = facts[name]
    assert run[f"warm_{number}"]["length"] >= 0.99 * run[f"cold_{number}"]["length"]


def test_the_model_drafting_for_itself_is_always_right_so_missing_kv_would_show(facts):
    assert [facts["draft"][f"warm_{number}"]["length"] for number in (0, 1)] == [4.0, 4.0]


def test_a_hit_leaves_one_block_more_to_compute_where_drafts_read_hidden_states(facts):
    """The draft's KV at the end of a block depends on the token behind it."""
    for number, blocks in enumerate((6, 7)):
        cached = {name: facts[name][f"warm_{number}"]["replies"][0]["cached"] for name in METHODS}
        assert cached == {"ngram": blocks * BLOCK, "draft": blocks * BLOCK, "eagle": (blocks - 1) * BLOCK}


@pytest.mark.parametrize("name", METHODS)
def test_generated_tokens_are_saved_without_drafts_that_were_not_verified(facts, name):
    for number in (0, 1):
        run = facts[name][f"turn_{number}"]
        assert [load[0] for load in run["loads"]] == ["landed"]
        prompt = facts[name][f"warm_{number}"]["replies"][0]["cached"]
        assert run["replies"][0]["cached"] == prompt + BLOCK


@pytest.mark.parametrize("name", METHODS)
def test_a_damaged_byte_is_found_although_results_are_asked_for_before_the_draft_has_run(facts, name):
    for number in (0, 1):
        assert [load[0] for load in facts[name][f"flipped_{number}"]["loads"]] == ["corrupt"]


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_left(facts, name):
    run = facts[name]
    assert run["drained"]["idle"]
    assert run["drained"]["free_blocks"] == run["blocks"]
    assert (run["drained"]["held"], run["drained"]["requests"], run["threads"]) == (0, 0, [])
