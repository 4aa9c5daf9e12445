"""vLLM's AsyncScheduler, which plans a step before it knows the tokens of the last one."""

import pytest


@pytest.fixture(scope="module")
def facts(drive):
    return drive("async")


def test_loads_go_to_the_background(facts):
    """vLLM would deliver the token of the step that was in flight when a load failed inside a forward."""
    assert facts["answer"] == [facts["hit"], True]


def test_blocks_are_saved_once_their_tokens_are_known_and_all_of_them_are(facts):
    assert facts["tokens_known"]
    assert facts["orders"] >= 4
    assert facts["saved_to"] == facts["computed"] // facts["block"] * facts["block"]
