import sys
import threading
import tracemalloc

import numpy as np
import pytest

from layercast.errors import BrokenInvariant, Refused
from layercast.move.cpu import CpuMover
from layercast.move.flights import HostFlight
from layercast.move.line import Line
from layercast.move.paced import PacedMover
from layercast.plan.pieces import Series
from layercast.testing.memory import SOON_S
from layercast.testing.move_laws import MoverLaws, pieces_of


class TestCpuMover(MoverLaws):
    def make_mover(self):
        return CpuMover()

    def test_copying_stages_nothing(self, mover):
        size, blocks = 1 << 16, 1024
        source, target = np.ones(2 * size * blocks, np.uint8), np.ones(2 * size * blocks, np.uint8)
        runs = pieces_of((source.ctypes.data, target.ctypes.data, size, blocks, 2 * size, 2 * size))
        plain = pieces_of(
            *((source.ctypes.data + i * 2 * size, target.ctypes.data + i * 2 * size, size) for i in range(blocks))
        )
        tracemalloc.start()
        for pieces in (runs, plain):
            mover.submit(pieces).wait(SOON_S)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < size * blocks // 64
        assert mover.staging_bytes == 0

    def test_a_series_moves_part_by_part_in_one_flight(self, mover):
        source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
        at, to = source.ctypes.data, target.ctypes.data
        (flight,) = mover.submit_all([Series(pieces_of((at, to, 4), (at + 8, to + 4, 4)), np.array([(0, 8), (16, 0)]))])
        flight.part(1).wait(SOON_S)
        assert target[:16].tolist() == [*range(16, 20), *range(24, 28), *range(4), *range(8, 12)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mover_whose_thread_has_ended_fails_what_it_had_and_takes_nothing_new():
    line, held, flights = Line("layercast-test"), HostFlight(), [HostFlight() for _ in range(3)]
    line.submit(flights[0], lambda _: sys.exit())
    line.submit(flights[1], lambda _: flights[1].land())
    line.submit(flights[2], lambda _: flights[2].land(), after=(held,))
    for flight in flights:
        with pytest.raises(BrokenInvariant, match="has ended"):
            flight.wait(5)
    with pytest.raises(Refused):
        line.submit(HostFlight(), lambda _: None)
    held.land()
    line.close(5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("make", [CpuMover, lambda: PacedMover(CpuMover(), 1.0)])
def test_a_mover_whose_thread_has_ended_by_itself_says_so(make):
    mover = make()
    assert mover.halted == ""
    flight = HostFlight()
    mover._line.submit(flight, lambda _: sys.exit())
    with pytest.raises(BrokenInvariant):
        flight.wait(5)
    assert "restart the engine" in mover.halted
    mover.close(5)


def test_what_is_done_aside_is_done_in_its_turn_on_the_thread_that_copies():
    mover, seen = CpuMover(), []
    for number in range(3):
        mover.aside(lambda number=number: seen.append((number, threading.current_thread().name)), seen.append)
    mover.close(5)
    assert seen == [(0, "layercast-move"), None, (1, "layercast-move"), None, (2, "layercast-move"), None]
    mover.aside(lambda: seen.append("never"), seen.append)
    assert isinstance(seen.pop(), Refused)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_was_to_be_done_aside_fails_by_itself_and_all_of_it_with_the_thread():
    mover, ends, started = CpuMover(), [], threading.Event()
    mover.aside(lambda: 1 / 0, ends.append)
    mover.aside(lambda: started.wait(5) and sys.exit(), ends.append)
    mover.aside(lambda: None, ends.append)
    started.set()
    mover._line._thread.join(5)
    assert [type(end) for end in ends] == [ZeroDivisionError, BrokenInvariant, BrokenInvariant]
    mover.close(5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_line_whose_thread_ends_by_itself_while_it_is_being_closed_leaves_nobody_waiting():
    line, go, told, flights = Line("layercast-test"), threading.Event(), [], [HostFlight() for _ in range(3)]
    line.submit(flights[0], lambda _: (go.wait(5), flights[0].land()))
    line.submit(flights[1], lambda _: sys.exit())
    line.submit(flights[2], lambda _: None)
    line.aside(lambda: None, told.append)
    closing = threading.Thread(target=line.close, args=(5,))
    closing.start()
    while not line._closed:
        closing.join(0.001)
    go.set()
    for flight in flights[1:]:
        with pytest.raises(BrokenInvariant):
            flight.wait(2)
    closing.join(2)
    assert not closing.is_alive()
    assert [type(error) for error in told] == [BrokenInvariant]
