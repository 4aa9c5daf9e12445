"""vLLM's two schedulers over forwards on paper: what a load that failed inside a forward costs, and nothing else."""

from types import SimpleNamespace

import pytest

from layercast.connector.vllm.forwards import Forwards
from layercast.connector.vllm.tracked import Tracked
from layercast.flow.orders import LoadOrder

SCHEDULES = 150


@pytest.fixture(scope="module")
def facts(drive):
    return drive("paper", str(SCHEDULES))


def test_no_token_comes_of_bytes_that_were_not_loaded_whatever_is_in_flight(facts):
    """Steps in flight, runners that keep positions themselves, ranks, preemptions, resets, aborts, late saves; 0 wrong
    tokens, no leak."""
    assert facts["bad"] == []
    assert facts["runs"] == SCHEDULES


def test_the_schedules_did_meet_what_they_are_for(facts):
    assert facts["steps_in_flight"] == [1, 2]
    assert facts["loads"] > 2 * SCHEDULES
    assert facts["joined"] > SCHEDULES // 2
    assert facts["failed"] > SCHEDULES
    assert facts["preempted"] > 2 * SCHEDULES


def test_no_load_fills_a_block_that_a_forward_under_way_uses(facts):
    """vLLM gives it out only once that forward has ended, or loads could not begin before."""
    assert facts["used"] == 0
    assert facts["beside"] > SCHEDULES


def test_no_load_fills_a_block_that_a_save_still_reads_unless_that_save_is_not_published(facts):
    """Loads wait for no forward, and copies of saves may end steps behind theirs."""
    assert facts["spoiled"] == 0


def test_all_blocks_are_free_in_the_end(facts):
    assert facts["free"] == [facts["blocks"]]


def test_a_failure_that_is_told_late_says_nothing_of_a_load_that_no_forward_has_waited_for():
    """Its request was preempted in between: that load is joined all the same once it is said to have come, or it would
    never end, and others that find its blocks would not wait for it."""
    forwards = Forwards(64, 1)
    load = LoadOrder("load-2", "r", 32, ())
    known = Tracked(SimpleNamespace(request_id="r"), {}, load=True, save=True, parked=True, loading=load)
    assert forwards.misread(["r"], {"r": known}) == []
    forwards.coming["r"] = load
    assert forwards.misread(["r"], {"r": known}) == []
    forwards.reading.add(load.id)
    assert forwards.misread(["r", "ended"], {"r": known}) == ["r"]
    forwards.reading.clear()
    known.loading = None
    assert forwards.misread(["r"], {"r": known}) == ["r"]


def test_a_load_that_was_said_to_have_come_is_left_behind_once():
    forwards = Forwards(64, 2)
    forwards.coming["r"] = LoadOrder("load-2", "r", 32, ())
    assert forwards.left_behind("r") == ["r"]
    assert forwards.left_behind("r") == []


def test_who_has_ended_keeps_nobody_company_and_nobody_does_himself():
    forwards = Forwards(64, 1)
    forwards.began({"a": 1, "b": 1, "c": 16}, False)
    assert [forwards.company(name, None).running for name in ("a", "new")] == [2, 3]
    for name in ("b", "b", "never seen"):
        forwards.left(name)
    assert [forwards.company(name, None).running for name in ("a", "b", "new")] == [1, 2, 2]
    forwards.began({}, False)  # a step without tokens runs nobody, and ends nobody either
    assert forwards.company("new", None).running == 2
    forwards.began({"b": 1}, False)
    assert [forwards.company(name, None).running for name in ("b", "new")] == [0, 1]


@pytest.mark.slow
def test_a_request_that_is_preempted_behind_a_forward_that_read_a_failed_load_says_nothing_of_that_forward(drive):
    """vLLM hears of such a load with that forward's outcome, and then looks at requests that run alone."""
    facts = drive("paper", "110", "1100")
    assert facts["bad"] == []
    assert facts["preempted"] > facts["loads"] > 110
    assert facts["used"] == facts["spoiled"] == 0
