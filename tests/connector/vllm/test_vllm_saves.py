"""Saves in real vLLM: they outlive their step, on blocks that are held by reference until every rank has reported."""

import pytest

BLOCK, BLOCK_BYTES = 32, 65_536


@pytest.fixture(scope="module")
def facts(drive):
    return drive("saves")


def tokens(run):
    return [reply["tokens"] for reply in run["replies"]]


@pytest.mark.parametrize("name", ["plain", "local"])
def test_a_prompt_repeated_at_once_is_loaded(facts, name):
    run = facts[name]
    assert run["again"]["replies"][0]["cached"] == 6 * BLOCK
    assert tokens(run["again"]) == tokens(run["cold"])


@pytest.mark.parametrize("name", ["plain", "local"])
def test_a_prompt_repeated_while_its_save_is_under_way_waits_for_it(facts, name):
    """The link carries the save slower than the engine answers, and nothing sleeps in between."""
    run = facts[name]
    assert run["slow"]["saves"] == []
    assert run["slow_again"]["replies"][0]["cached"] == 6 * BLOCK
    assert tokens(run["slow_again"]) == tokens(run["slow"])


def test_a_prompt_that_waits_for_a_save_costs_steps_without_work(facts):
    assert facts["plain"]["slow_again"]["idle_steps"] > 0
    assert [end for end, *_ in facts["plain"]["slow_again"]["loads"]] == ["landed"]


@pytest.mark.parametrize("name", ["plain", "local"])
def test_generated_tokens_are_saved_and_the_next_turn_loads_them(facts, name):
    run = facts[name]
    told = [*run["talk"]["saves"], *run["next_turn"]["saves"]]  # the last of them may be told behind the answer
    assert sum(save[1] for save in told) == 3 * BLOCK_BYTES
    assert run["next_turn"]["replies"][0]["cached"] == 9 * BLOCK


def test_no_block_is_held_by_an_idle_engine(facts):
    for name in ("plain", "local"):
        runs = [run for run in facts[name].values() if isinstance(run, dict) and "free_blocks" in run]
        assert len(runs) >= 8
        assert {run["free_blocks"] for run in runs} == {facts[name]["blocks"]}
        assert {run["held"] for run in runs} == {0}


@pytest.mark.parametrize("storm", ["storm", "slow_storm"])
@pytest.mark.parametrize("name", ["plain", "local"])
def test_aborts_at_every_stage_leave_nothing(facts, name, storm):
    run = facts[name][storm]
    assert run["idle"]
    assert run["requests"] == 0


def test_requests_that_a_small_cache_preempts_answer_as_alone(facts):
    run = facts["tight"]
    assert run["preemptions"] > 0
    assert [end for end, *_ in run["crowd"]["loads"]] == ["landed"] * len(run["crowd"]["loads"])
    assert len(run["crowd"]["loads"]) > 0
    assert tokens(run["crowd"]) == facts["plain"]["reference"]


def test_threads_end_with_their_engine(facts):
    assert [facts[name]["threads"] for name in ("plain", "local", "tight")] == [[]] * 3
