"""Naps that end on time: the slack of the thread that waits, and of it alone."""

import gc
import threading
from contextlib import suppress

import pytest

from layercast.move.naps import _GET_SLACK, _SET_SLACK, SLACK_NS, _prctl, on_time


def slack():
    return _prctl()(_GET_SLACK, 0, 0, 0, 0)


@pytest.mark.parametrize("before", [None, 3_000_000_000])
def test_a_thread_has_its_slack_back_whatever_it_was_and_however_the_block_ends(before):
    def waits():
        if before is not None:
            _prctl()(_SET_SLACK, before, 0, 0, 0)
        seen.append(slack())
        with suppress(KeyError), on_time():
            with on_time():
                seen.append(slack())
            seen.append(slack())
            raise KeyError
        seen.append(slack())

    ours, seen = slack(), []
    thread = threading.Thread(target=waits)
    thread.start()
    thread.join()
    own = before or ours
    assert seen == [own, SLACK_NS, SLACK_NS, own]
    assert slack() == ours


def test_a_nap_leaves_nothing_to_collect():
    with on_time():
        gc.collect()
    gc.disable()
    try:
        for _ in range(100):
            with on_time():
                pass
        assert gc.collect() < 100
    finally:
        gc.enable()
