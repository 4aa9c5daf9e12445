"""The driver of vLLM's GPU runner: what its steps mean for loads and saves, whether or not hooks fire."""

import pytest

LAYERS, IDLE_S, HOOKS_S = 4, 30e-6, 50e-6
SLOW = 20
"""How much slower than its limit a shared machine may be at the moment."""


@pytest.fixture(scope="module")
def facts(drive):
    return drive("active")


def test_layers_that_announce_themselves_twice_a_step_are_saved_once(facts):
    assert facts["cold"][-1]["saves"] == [[True, LAYERS, 0]]


def test_layers_of_a_full_graph_are_swept(facts):
    assert facts["swept"][-1]["saves"] == [[True, LAYERS, LAYERS]]


@pytest.mark.parametrize("kind", ["pieces", "full"])
def test_a_hit_lands_in_pieces_and_before_a_full_graph(facts, kind):
    steps = facts[kind]
    assert steps[0]["tokens"] == 8
    assert steps[-1]["loads"] == [["landed", LAYERS]]
    assert not any(step["invalid"] for step in steps)
    assert facts[f"{kind}_bytes"] > 0


def test_full_graphs_that_load_are_counted_for_one_request_and_for_32(facts):
    for kind in ("full", "many"):
        assert [step["full_graphs"].get("load", 0) for step in facts[kind]][:2] == [1, 0]
    assert facts["many"][0]["tokens"] == 32 * 8
    assert facts["many"][-1]["loads"] == [["landed", LAYERS]] * 32
    assert not any(step["invalid"] for step in facts["many"])


def test_layers_whose_hooks_were_never_called_are_waited_for_before_the_forward(facts):
    assert facts["unheard"][0]["tokens"] == 8
    assert facts["unheard"][-1]["loads"] == [["landed", LAYERS]]


def test_a_forward_without_hooks_that_was_no_full_graph_is_recomputed(facts):
    first, again, *_ = facts["no_hooks"]
    assert len(first["invalid"]) == 6
    assert (again["tokens"], again["invalid"]) == (200, [])
    assert facts["no_hooks"][-1]["loads"] == [["late", LAYERS]]


def test_what_a_failed_step_was_to_load_is_reported_by_the_next_one(facts):
    first, second, third, *_ = facts["failed"]
    assert first is None
    assert len(second["invalid"]) == 6
    assert (third["tokens"], third["invalid"]) == (200, [])


def test_idle_steps_and_hooks_without_work_cost_microseconds(facts):
    assert facts["times"]["idle_s"] < IDLE_S * SLOW
    assert facts["times"]["hooks_s"] < HOOKS_S * SLOW


def test_nothing_is_left(facts):
    assert facts["drained"]["idle"]
    assert (facts["drained"]["held"], facts["drained"]["requests"], facts["threads"]) == (0, 0, [])
