"""Faults injected into real vLLM: never another text; an equal one, or an error where the engine is told to fail."""

from collections import Counter

import pytest

EACH = 25
ENGINES = ["llama recompute", "llama fail", "gemma3 recompute", "gemma3 fail"]
HARMLESS = "full_slab"
"""It costs a save, never a load."""


@pytest.fixture(scope="module")
def facts(drive):
    return drive("faults", str(EACH))


def test_over_a_hundred_faults_of_five_kinds_were_injected(facts):
    kinds = Counter(fault["kind"] for name in ENGINES for fault in facts[name]["faults"])
    assert kinds.total() >= 100
    assert set(kinds) == {"lost_byte", "late_layer", "full_slab", "evicted", "dead_thread"}


@pytest.mark.parametrize("name", ENGINES[::2])
def test_told_to_recompute_every_answer_is_the_same(facts, name):
    for fault in facts[name]["faults"]:
        assert fault["finish"] == "length", fault
        assert fault["equal"], fault
        assert fault["other"], fault


@pytest.mark.parametrize("name", ENGINES[1::2])
def test_told_to_fail_an_answer_is_the_same_or_an_error_without_text(facts, name):
    ends = Counter()
    for fault in facts[name]["faults"]:
        ends[fault["finish"]] += 1
        assert fault["equal"] if fault["finish"] == "length" else fault["text"] == 0, fault
    assert ends["error"] >= EACH // 2


@pytest.mark.parametrize("name", ENGINES)
def test_the_faults_did_hit(facts, name):
    """A byte lost is found out; what was evicted is not loaded; a dead thread loads nothing."""
    for fault in facts[name]["faults"]:
        if fault["kind"] == "lost_byte":
            assert "corrupt" in fault["loads"], fault
        elif fault["kind"] == "dead_thread":
            assert set(fault["loads"]) == {"lost"}, fault
        elif fault["kind"] == "late_layer":
            failed = not (fault["equal"] and fault["other"])
            assert failed or "late" in fault["loads"] or fault["steps"] > 1, fault


@pytest.mark.parametrize("name", ENGINES)
def test_once_the_thread_that_copies_is_dead_nothing_is_promised_or_saved_and_the_engine_goes_on(facts, name):
    stopped = facts[name]["stopped"]
    assert stopped["equal"] == [True, True]
    assert stopped["loads"] == stopped["saves"] == [[], []]
    assert stopped["told"] == ["the pool has stopped, as the log says; restart the engine"] * 2
    assert len(stopped["log"]) == 1
    assert "layercast-move has ended" in stopped["log"][0]
    assert (stopped["held"], stopped["idle"], stopped["free_blocks"]) == (0, True, facts[name]["blocks"])


@pytest.mark.parametrize("name", ENGINES)
def test_after_every_fault_no_block_is_held(facts, name):
    run = facts[name]
    assert {fault["free_blocks"] for fault in run["faults"]} == {run["blocks"]}
    assert {(fault["held"], fault["requests"], fault["idle"]) for fault in run["faults"]} == {(0, 0, True)}
    assert run["threads"] == []
