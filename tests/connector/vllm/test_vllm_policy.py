"""Hits beside running requests in real vLLM: how each is loaded, by measured costs, and that faults change no text."""

import pytest

ENGINES = ["plain", "caching"]
GBPS = 0.4
HIT, BLOCK = 192, 32


@pytest.fixture(scope="module")
def facts(drive):
    return drive("policy", "12")


def receipt(facts, name, mode, at=0):
    found, window, reason, tokens, verified, miss = facts[name]["modes"][mode]["receipts"][at]
    assert (tokens, verified, miss) == (HIT, True, None)
    return found, window, reason


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("mode", ["alone", "unknown", "parts", "two", "follower"])
def test_whatever_the_way_the_answers_are_the_same(facts, name, mode):
    first, other, short = facts[name]["wants"]
    run = facts[name]["modes"][mode]
    assert run["hits"] == [first, *{"two": [other], "follower": [short]}.get(mode, [])]
    assert run["talk"] == (None if mode == "alone" else facts[name]["talk"])


@pytest.mark.parametrize("name", ENGINES)
def test_alone_a_hit_is_loaded_inside_its_forward(facts, name):
    assert receipt(facts, name, "alone") == ("layerwise", 1, "windows of 1 of 4 layers; nobody else is running")
    assert facts[name]["modes"]["alone"]["background"] == 0


@pytest.mark.parametrize("name", ENGINES)
def test_beside_others_a_hit_of_unknown_cost_waits_in_the_background(facts, name):
    mode, _, reason = receipt(facts, name, "unknown")
    assert mode == "background"
    assert "not known yet" in reason
    assert facts[name]["modes"]["unknown"]["joins"] == 0


@pytest.mark.parametrize("name", ENGINES)
def test_beside_others_a_hit_that_would_hold_them_up_is_loaded_in_two_parts(facts, name):
    mode, _, reason = receipt(facts, name, "parts")
    assert mode == "background, then layerwise"
    assert reason.startswith("1 others running would wait")
    runs = [facts[name]["modes"][mode] for mode in ("parts", "two", "follower")]
    assert all(run["background"] and not run["inside"] for run in runs)
    assert sum(run["joins"] for run in runs) >= 1


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_being_loaded_for_another_is_not_loaded_twice(facts, name):
    """Its request waits for that load, and finds the blocks in vLLM's own cache; where there is none, it loads."""
    two = facts[name]["modes"]["two"]
    first, other = (receipt[3] for receipt in two["receipts"])
    assert (first, other) == (HIT, 0 if name == "caching" else HIT)
    assert two["background"] == (1 if name == "caching" else 2)


@pytest.mark.parametrize("name", ENGINES)
def test_no_layer_is_passed_before_the_loads_that_its_forward_joins_are_asked_for(facts, name):
    """vLLM calls `start_load_kv` behind a forward for which it has matched nothing itself."""
    assert facts[name]["unasked"] == 0


@pytest.mark.parametrize("name", ENGINES)
def test_what_loads_and_forwards_cost_is_measured(facts, name):
    link, token_s, forward_s = facts[name]["costs"]
    assert 0 < link < 1.05 * GBPS * 1e9 / 8
    assert 0 < token_s < forward_s < 1


@pytest.mark.parametrize("name", ENGINES)
def test_faults_in_either_part_change_no_answer_and_leave_nothing(facts, name):
    run = facts[name]
    for fault in run["faults"]:
        assert (fault["finish"], fault["equal"], fault["again"]) == (["length"], True, True), fault
        assert fault["talk"] == run["talk"], fault
        assert (fault["idle"], fault["held"], fault["requests"]) == (True, 0, 0), fault
        assert fault["free_blocks"] == run["blocks"], fault
    assert {fault["kind"] for fault in run["faults"]} == {"lost_byte", "late_layer", "evicted"}
    assert any(fault["joins"] for fault in run["faults"])
    assert run["threads"] == []


@pytest.mark.parametrize("name", ENGINES)
def test_what_a_forward_computes_from_lost_blocks_is_never_stored(facts, name):
    lost = facts[name]["lost"]
    for run in ("hit", "again"):
        assert lost[run]["replies"][0]["tokens"] == lost["want"]
    assert lost["again"]["replies"][0]["cached"] >= HIT - BLOCK
    assert lost["drained"]["idle"]


@pytest.mark.parametrize("name", ENGINES)
def test_what_an_aborted_request_was_said_to_have_is_found_by_nobody_if_it_has_failed(facts, name):
    run = facts[name]["unscheduled"]
    assert (run["failed"], run["mode"], run["status"]) == (True, "background, then layerwise", "WAITING")
    assert run["tokens"] == run["want"]
    assert (run["idle"], run["held"], run["free_blocks"]) == (True, 0, facts[name]["blocks"])
