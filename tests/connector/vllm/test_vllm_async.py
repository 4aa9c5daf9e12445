"""vLLM's AsyncScheduler, which plans a step before it knows the tokens of the last one."""

import pytest


@pytest.fixture(scope="module")
def facts(drive):
    return drive("async")


def test_loads_stay_inside_the_forward(facts):
    """What a load that fails there costs is in test_vllm_paper.py."""
    assert facts["answer"] == [facts["hit"], False]


def test_blocks_are_saved_once_their_tokens_are_known_and_all_of_them_are(facts):
    assert facts["tokens_known"]
    assert facts["orders"] >= 3, "the prompt, a lump of generated blocks, and the rest"
    assert facts["saved_to"] == facts["computed"] // facts["block"] * facts["block"]


def test_requests_that_run_in_step_are_not_saved_in_one(facts):
    saves, most = facts["choir"]
    assert saves >= 8, "16 blocks in lumps of 8"
    assert most < 8
