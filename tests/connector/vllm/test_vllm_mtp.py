"""Multi-token prediction in real vLLM: the same tokens, and drafts that are as good after a hit as after computing."""

import pytest

NAMES, NUMBERS = ["mimo", "deepseek"], [0, 1]
PROMPTS = [200, 230]
USUAL = 1.8
"""Acceptance length of a layer that foretells the model; a layer that is always wrong has 1."""


@pytest.fixture(scope="module")
def told(drive):
    return drive("mtp")


@pytest.fixture(scope="module")
def facts(told):
    return told["mimo"]


def tokens(run):
    return run["replies"][0]["tokens"]


@pytest.mark.parametrize("number", NUMBERS)
def test_tokens_are_those_of_an_engine_without_drafts(facts, number):
    run = facts["runs"][number]
    for kind in ("cold", "warm", "forged", "flipped"):
        assert tokens(run[kind]) == facts["plain"][number], kind


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_hit_is_loaded_with_the_mtp_layer_and_is_one_block_shorter(told, name, number):
    facts = told[name]
    run, block = facts["runs"][number], facts["block"]
    ((end, verified, nbytes, layers, _),) = run["warm"]["loads"]
    assert (end, verified, layers, facts["layers"] - facts["target"]) == ("landed", True, facts["layers"], 1)
    assert run["bytes"] == nbytes
    assert run["warm"]["replies"][0]["cached"] == ((PROMPTS[number] - 1) // block - 1) * block


@pytest.mark.parametrize("number", NUMBERS)
def test_drafts_are_accepted_after_a_hit_as_after_computing(facts, number):
    run = facts["runs"][number]
    assert run["cold"]["length"] > USUAL
    assert run["warm"]["length"] >= 0.99 * run["cold"]["length"]


@pytest.mark.parametrize("number", NUMBERS)
def test_wrong_kv_of_the_mtp_layer_alone_shows_in_what_is_accepted(facts, number):
    run = facts["runs"][number]
    assert [load[:2] for load in run["forged"]["loads"]] == [["landed", True]]
    assert run["forged"]["length"] < 0.8 * run["cold"]["length"]


@pytest.mark.parametrize("number", NUMBERS)
def test_generated_tokens_are_saved_without_drafts_that_were_not_verified(facts, number):
    run = facts["runs"][number]
    assert [load[0] for load in run["turn"]["loads"]] == ["landed"]
    assert run["turn"]["replies"][0]["cached"] == run["warm"]["replies"][0]["cached"] + facts["block"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_damaged_byte_is_found_and_computed_again(facts, number):
    assert [load[0] for load in facts["runs"][number]["flipped"]["loads"]] == ["corrupt"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left(told, name):
    facts = told[name]
    drained = facts["drained"]
    assert (drained["idle"], drained["free_blocks"]) == (True, facts["blocks"])
    assert (drained["held"], drained["requests"], facts["threads"]) == (0, 0, [])
