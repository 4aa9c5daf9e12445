"""vLLM's two schedulers over forwards on paper: what a load that failed inside a forward costs, and nothing else."""

import pytest

SCHEDULES = 200


@pytest.fixture(scope="module")
def facts(drive):
    return drive("paper", str(SCHEDULES))


def test_no_token_comes_of_bytes_that_were_not_loaded_whatever_is_in_flight(facts):
    """Steps in flight, runners that keep positions themselves, preemptions, aborts; 0 wrong tokens."""
    assert facts["bad"] == []
    assert facts["runs"] == SCHEDULES


def test_the_schedules_did_meet_what_they_are_for(facts):
    assert facts["steps_in_flight"] == [1, 2]
    assert facts["loads"] > 2 * SCHEDULES
    assert facts["failed"] > SCHEDULES
    assert facts["preempted"] > facts["failed"]


def test_all_blocks_are_free_in_the_end(facts):
    assert facts["free"] == [facts["blocks"]]
