"""Real vLLM over a device that carries its copies out later, with fewer blocks than its requests have."""

import pytest

RUNS = ["cold", "hits", "turns", "again"]


@pytest.fixture(scope="module")
def facts(drive):
    return drive("device")


@pytest.mark.parametrize("run", RUNS)
def test_it_answers_as_an_engine_that_computes_all_by_itself(facts, run):
    alone = facts["alone"]["turns" if run == "turns" else "prompts"]
    assert [reply["tokens"] for reply in facts[run]["replies"]] == alone


@pytest.mark.parametrize("run", RUNS[1:])
def test_every_request_of_a_crowd_gets_its_prefix_from_the_pool(facts, run):
    assert [reply["cached"] for reply in facts[run]["replies"]] == [192] * len(facts[run]["replies"])
    assert {end for end, *_ in facts[run]["loads"]} == {"landed"}
    assert facts["most_loads_a_step"] > 1


def test_requests_were_preempted_and_loads_went_in_the_background_or_this_shows_less(facts):
    assert facts["preemptions"] > 0
    assert facts["background"] > 0


def test_everything_is_given_back(facts):
    left = [facts[run] for run in (*RUNS, "storm", "drained")]
    assert {run["free_blocks"] for run in left} == {facts["blocks"]}
    assert {(run["held"], run["requests"]) for run in left} == {(0, 0)}
    assert facts["storm"]["idle"]
    assert (facts["threads"], facts["bells_left"]) == ([], facts["bells"])
