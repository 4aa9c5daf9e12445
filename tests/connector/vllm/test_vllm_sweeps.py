"""Steps that vLLM replays as one full graph: what is loaded before and saved behind them is counted."""

import pytest

SIZES = [1, 32]


@pytest.fixture(scope="module")
def facts(drive):
    return drive("sweeps")


@pytest.mark.parametrize("size", SIZES)
def test_a_full_graph_loads_before_and_is_swept_behind_and_both_are_counted(facts, size):
    run = facts[str(size)]
    assert run["tokens"] == size * facts["new"]
    assert run["counters"]["full_graph_steps_with_loads"] == {"load": 1}
    assert run["counters"]["swept_layers"] == {"save": size * facts["layers"]}


@pytest.mark.parametrize("size", SIZES)
def test_every_request_of_the_batch_is_loaded_and_saved_whole(facts, size):
    run = facts[str(size)]
    assert run["loads"] == [["landed", facts["layers"]]] * size
    assert run["saves"] == [[True, facts["layers"], facts["layers"]]] * size
    assert run["invalid"] == []


def test_nothing_is_left(facts):
    assert facts["drained"]["idle"]
    assert (facts["drained"]["held"], facts["drained"]["requests"], facts["threads"]) == (0, 0, [])
