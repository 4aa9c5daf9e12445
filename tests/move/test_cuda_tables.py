"""Tables of the kernel: each has one program at a time, and comes back whatever becomes of that."""

import gc
import os
import sys
import threading
from functools import partial

import numpy as np
import pytest
from async_device import AsyncDevice
from host_device import KERNEL, DeviceMemory, HostDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_mover import KERNELS, mover_of, series_in

from layercast.errors import BrokenInvariant, DeadlineExceeded, DeviceFailed, Missing, Refused
from layercast.move.costs import Direction, Way, only
from layercast.move.cuda_desk import Desk
from layercast.move.cuda_driver import DEVICE, HOST
from layercast.move.cuda_lane import Lane
from layercast.move.cuda_tables import SPARE, TABLE_BYTES, TABLES, Pool, Tables
from layercast.move.flights import HostFlight
from layercast.move.kernels.pieces_host import plain_scribe
from layercast.testing.move_laws import BRIEF_S, SOON_S, pieces_of


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def later():
    device = AsyncDevice(longest=64)
    yield device
    device.end()
    assert device.troubles == []


def complete(mover, direction):
    """Whether all tables of a lane are in its pool, each once."""
    pool = mover._arm(direction).lane.tables
    return len(pool) == TABLES and {*map(id, pool._free)} == {*map(id, pool._all)} and len(pool._free) == TABLES


MEMORY = np.zeros(2 * TABLE_BYTES // 8, np.int64)
STEPS = ["take", "take next", "issue", "abandon", "move"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=80))
def test_tables_have_one_program_at_a_time_from_when_it_is_written_until_the_device_is_done_with_them(steps):
    """Programs are written ahead by any thread, and by the one that issues, which finds tables at any time."""
    at = MEMORY.ctypes.data
    every = [Tables(at, at, event) for event in range(TABLES)]
    queued, moved, slept, ahead, reading = 0, 0, [], [], {}

    def sleep_until(event):
        nonlocal moved
        moved = max(moved, reading.get(event, 0))
        slept.append(event)

    def issue(taken):
        nonlocal queued
        queued += 1
        reading[taken[0].free] = queued
        pool.give_back(taken, queued)
        assert taken == []

    pool = Pool(every, lambda number: number <= moved, sleep_until)
    for step in steps:
        if step == "take":
            taken = []
            if pool.take(taken):
                assert reading.get(taken[0].free, 0) <= moved
                assert not any(taken[0] is theirs[0] for theirs in ahead)
                ahead.append(taken)
            assert len(ahead) <= TABLES - SPARE
        elif step == "take next":
            pool.take_next(taken := [])
            assert reading.get(taken[0].free, 0) <= moved
            issue(taken)
        elif step == "issue" and ahead:
            issue(ahead.pop(0))
        elif step == "abandon" and ahead:
            pool.give_back(ahead.pop(), None)
        elif step == "move" and moved < queued:
            moved += 1
        assert len(pool._free) + len(ahead) == TABLES
    if ahead:
        with pytest.raises(DeadlineExceeded):
            pool.close(0.0)
    else:
        assert {*map(id, pool.close(0.0))} == {*map(id, every)}
    assert not pool.take([])


def test_tables_hold_what_was_added_and_say_how_much_there_is_to_upload():
    tables = Tables(MEMORY.ctypes.data, 1 << 40, 1)
    first = tables.add(pieces_of((16, 32, 48), (160, 320, 480), (0, 16, 16)), plain_scribe())
    second = tables.add(pieces_of((1600, 3200, 1 << 20)), plain_scribe())
    assert first.tables.tolist() == [[1 << 40, 4, 3, 1]]
    assert second.tables.tolist() == [[(1 << 40) + 96, 2, 1, 64]]
    assert MEMORY[:18].tolist() == [16, 160, 0, 0, 32, 320, 16, 0, 6, 60, 2, 0, 1600, 0, 3200, 0, 1 << 17, 0]
    tables.complete()
    assert tables._copy.tolist() == [MEMORY.ctypes.data, 1 << 40, 144, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_launch_asserts_what_the_compiled_code_relies_on(column):
    pieces, shifts = pieces_of((64, 64, 64), (64, 64, 64)), np.zeros((2, 2), np.int64)
    pieces.table[column, 1] = shifts[1, column % 2] = 8
    tables = Tables(MEMORY.ctypes.data, 1 << 40, 1)
    with pytest.raises(AssertionError, match="multiples of 16"):
        tables.add(pieces, plain_scribe())
    assert tables.used == 0
    with pytest.raises(AssertionError, match="multiples of 16"):
        KERNEL.values(np.array([[1 << 40, 2, 2, 1]]), shifts)
    for table in ((1 << 40) + 8, 2, 2, 1), (1 << 40, 3, 2, 1):
        with pytest.raises(AssertionError):
            KERNEL.values(np.array([table]), shifts * 2)


def test_who_closes_a_pool_waits_for_who_writes_in_tables_of_it():
    at = MEMORY.ctypes.data
    pool, taken = Pool([Tables(at, at, event) for event in range(TABLES)], lambda _: True, lambda _: None), []
    assert pool.take(taken)
    threading.Timer(BRIEF_S, pool.give_back, (taken, None)).start()
    assert len(pool.close(SOON_S)) == TABLES
    assert taken == []


def test_threads_that_submit_by_the_kernel_at_once_each_move_what_is_theirs(later):
    mover, memory, threads, waves = mover_of(later, KERNELS), DeviceMemory(later, (DEVICE,)), 6, 8
    made = [[series_in(memory, 2 + (nth + wave) % 7, (0, 1, 2)) for wave in range(waves)] for nth in range(threads)]
    flights, together = [[] for _ in range(threads)], threading.Barrier(threads)

    def submit(nth):
        together.wait(SOON_S)
        for series, _, _ in made[nth]:
            flights[nth] += mover.submit_all([series])

    writers = [threading.Thread(target=submit, args=(nth,)) for nth in range(threads)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(SOON_S)
    for ours, theirs in zip(flights, made, strict=True):
        for flight, (_, ends, wanted) in zip(ours, theirs, strict=True):
            flight.wait(SOON_S)
            assert [memory.read(end, 64) for end in ends] == wanted
        assert [flight.number for flight in ours] == sorted(flight.number for flight in ours)
        for flight in ours:
            flight.wave.wait(SOON_S)
    assert complete(mover, Direction.LOCAL)
    mover.close(SOON_S)


def test_a_wave_that_found_no_tables_moves_before_those_behind_it_that_have_all_that_may_be_taken(later, monkeypatch):
    """The thread that issues must not wait for tables that only come back behind what it is about to issue."""
    mover, memory, started, begin = mover_of(later, KERNELS), DeviceMemory(later, (DEVICE, HOST)), [], Lane.start
    size, flag, word = 4096, np.zeros(1, np.int32), threading.Event()
    target = memory.alloc(size) and memory.alloc(size)

    def start(lane, program, way):
        started.append(threading.current_thread() is threading.main_thread())
        begin(lane, program, way)

    def wave(value, behind=0):
        source = later.device_memory(size)
        memory.write(source, bytes([value]) * size)
        rows = pieces_of(*((source + 64 * i, target + 64 * i, 64) for i in range(size // 64)))
        return mover.submit_all([rows], behind=[behind])[0]

    monkeypatch.setattr(Lane, "start", start)
    monkeypatch.setattr(Desk, "lay", lambda *_: False)
    flights = [wave(1, flag.ctypes.data)]
    while len(flights) < TABLES:
        assert flights[-1].wave.issued.wait(SOON_S)
        flights.append(wave(1))
    assert flights[-1].wave.issued.wait(SOON_S)
    assert all(started)
    mover.aside(lambda: word.wait(SOON_S), lambda _: None)
    flights.append(wave(2))
    assert len(started) == TABLES, "all tables are read by what is held, so it is left to the thread that issues"
    flag[0] = 1
    flights[TABLES - 1].wait(SOON_S)
    flights += [wave(3 + nth) for nth in range(TABLES)]
    assert started == [True] * (2 * TABLES - SPARE)
    word.set()
    for flight in flights:
        flight.wait(SOON_S)
        flight.wave.wait(SOON_S)
    assert started.count(False) == 1 + SPARE
    assert memory.read(target, size) == bytes([2 + TABLES]) * size
    assert [entry[3] for entry in later.log if entry[0] == "write"] == list(range(1, len(flights) + 1))
    assert complete(mover, Direction.DOWN)
    mover.close(SOON_S)


def two_rows(memory):
    source, target = memory.alloc(4096), memory.alloc(4096)
    memory.write(source, os.urandom(4096))
    return pieces_of((source, target, 32), (source + 64, target + 64, 32))


@pytest.mark.parametrize("way", [Way.STAGED, Way.KERNEL])
def test_a_wave_that_fails_as_what_it_waits_for_did_holds_no_tables(device, way):
    mover, memory = mover_of(device, only(way)), DeviceMemory(device, (HOST, DEVICE))
    rows, arrival = two_rows(memory), HostFlight()
    flights = [mover.submit(rows, after=[arrival]) for _ in range(2 * TABLES)]
    arrival.fail(Missing("gone"))
    for flight in flights:
        with pytest.raises(Missing):
            flight.wait(SOON_S)
    assert complete(mover, Direction.UP)
    mover.submit(rows).wait(SOON_S)
    mover.close(SOON_S)


@pytest.mark.parametrize("laid", [False, True])
@pytest.mark.parametrize(("call", "code"), [("launch", 1), ("copy", 1), ("launch", 700), ("write", 700)])
def test_a_wave_that_the_device_refuses_gives_its_tables_back(device, monkeypatch, call, code, laid):
    if not laid:
        monkeypatch.setattr(Desk, "lay", lambda *_: False)
    mover, memory = mover_of(device, KERNELS), DeviceMemory(device, (HOST, DEVICE))
    rows = two_rows(memory)
    device.failing[call] = code
    for _ in range(2 * TABLES):
        with pytest.raises(DeviceFailed):
            mover.submit(rows).wait(SOON_S)
    device.failing.clear()
    device.lost = ""
    mover.submit(rows).wave.wait(SOON_S)
    assert complete(mover, Direction.UP)
    mover.close(SOON_S)


@pytest.mark.parametrize("way", [Way.STAGED, Way.KERNEL])
@pytest.mark.parametrize("room", ["laid", "queued"])
def test_a_wave_whose_program_can_not_be_written_or_run_gives_its_tables_back(device, monkeypatch, way, room):
    mover, memory = mover_of(device, only(way)), DeviceMemory(device, (HOST, DEVICE))
    rows, broken = two_rows(memory), MemoryError("no room for an array")

    def fails(*_, **_named):
        raise broken

    if room == "queued":
        monkeypatch.setattr(Desk, "lay", lambda *_: False)
        monkeypatch.setattr(mover, "_issue", mover._issue._replace(run=fails))
    else:
        monkeypatch.setattr(Lane, "move", fails)
    for _ in range(2 * TABLES):
        with pytest.raises(MemoryError, match="no room"):
            mover.submit(rows).wait(SOON_S)
    monkeypatch.undo()
    mover.submit(rows).wave.wait(SOON_S)
    assert complete(mover, Direction.UP)
    mover.close(SOON_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_stands_behind_a_thread_that_has_ended_gives_its_tables_back(device, monkeypatch):
    mover, memory, go = mover_of(device, KERNELS), DeviceMemory(device, (DEVICE, HOST)), threading.Event()
    rows = two_rows(memory)

    def ends(*_):
        sys.exit()

    monkeypatch.setattr(Desk, "lay", lambda *_: False)
    monkeypatch.setattr(mover, "_issue", mover._issue._replace(run=ends))
    mover.submit(pieces_of())
    mover.aside(partial(go.wait, SOON_S), lambda _: None)
    flights = [mover.submit(rows) for _ in range(3)]
    go.set()
    for flight in flights:
        with pytest.raises(BrokenInvariant):
            flight.wave.wait(SOON_S)
        assert flight.wave.issued.wait(SOON_S)
    assert complete(mover, Direction.DOWN)
    mover.close(SOON_S)


def test_a_wave_that_a_mover_refuses_as_it_is_closed_meanwhile_gives_its_tables_back_first(device, monkeypatch):
    mover, memory, closing, move = mover_of(device, KERNELS), DeviceMemory(device, (HOST, DEVICE)), [], Lane.move
    rows = two_rows(memory)
    mover.submit(rows).wave.wait(SOON_S)
    lane = mover._arm(Direction.UP).lane
    slept = threading.Event()

    def closes(*given, **rest):
        closing.append(threading.Thread(target=mover.close, args=(SOON_S,)))
        closing[0].start()
        slept.wait(BRIEF_S)
        assert closing[0].is_alive(), "memory that is being written in must not be given back"
        return move(*given, **rest)

    monkeypatch.setattr(Lane, "move", closes)
    with pytest.raises(Refused, match="closed"):
        mover.submit(rows)
    closing[0].join(SOON_S)
    assert not closing[0].is_alive()
    assert len(lane.tables._free) == TABLES
    gc.collect()  # an error keeps the frame that it was raised in, and that its wave
    assert not device.live
