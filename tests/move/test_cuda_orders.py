"""In which order the parts of a submission move, and which of them a program takes together."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layercast.move.base import Waits
from layercast.move.cuda_orders import Orders
from layercast.plan.pieces import Series
from layercast.testing.move_laws import pieces_of

TURNS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True).map(sorted), min_size=1, max_size=5)


def orders_of(turns, *, shared=True):
    """Batches whose parts have these turns; shared: all of them move the same pieces."""
    own = [pieces_of((64 * nth, 1 << 20, 16)) for nth in range(len(turns))]
    batches = [
        Series(own[0 if shared else nth], np.zeros((len(ours), 2), np.int64), tuple(ours))
        for nth, ours in enumerate(turns)
    ]
    nothing = (0,) * len(turns)
    return Orders(batches, ((),) * len(turns), nothing, nothing, Waits.BUSY)


def parts_of(runs):
    return [(run.batch, nth) for run in runs for nth in run.parts]


@given(TURNS)
def test_parts_move_by_their_turns_and_those_of_a_batch_that_follow_each_other_in_one_run(turns):
    runs = orders_of(turns).runs()
    by_turn = sorted((turn, batch, nth) for batch, ours in enumerate(turns) for nth, turn in enumerate(ours))
    assert parts_of(runs) == [(batch, nth) for _, batch, nth in by_turn]
    assert [run.place for run in runs] == np.cumsum([0, *(len(run.parts) for run in runs)])[:-1].tolist()
    assert all(one.batch != other.batch for one, other in pairwise(runs))


@given(TURNS, st.booleans())
def test_of_a_wave_that_grows_every_part_moves_once_in_the_same_order(turns, shared):
    orders = orders_of(turns, shared=shared)
    runs = orders.runs()
    first, *others = orders.growing(runs)
    assert len(parts_of(first)) == 1
    assert parts_of(first) + [part for some in others for part in parts_of(some)] == parts_of(runs)
    places = [
        place for some in (first, *others) for run in some for place in range(run.place, run.place + len(run.parts))
    ]
    assert places == [*range(len(places))]


def test_windows_that_are_saved_layer_by_layer_go_window_by_window():
    """Each behind its own mark: none waits for one that is written after it."""
    windows = [tuple(range(first, first + 8)) for first in range(0, 32, 8)]
    assert [run.parts for run in orders_of(windows).runs()] == [range(8)] * 4
