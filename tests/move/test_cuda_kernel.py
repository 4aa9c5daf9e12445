"""What goes by the kernel, in programs of its own or by way of staging memory."""

import os
import threading

import numpy as np
import pytest
from async_device import AsyncDevice
from host_device import DeviceMemory, HostDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_mover import KERNELS, STAGED, mover_of, series_in

from layercast.move.costs import Way, only
from layercast.move.cuda_desk import Desk
from layercast.move.cuda_driver import DEVICE, HOST
from layercast.move.cuda_lane import Lane
from layercast.move.cuda_stage import SLOTS
from layercast.move.cuda_tables import TABLES
from layercast.testing.move_laws import SOON_S, pieces_of


@pytest.fixture
def device():
    return HostDevice()


SHAPES = st.tuples(st.integers(0, 5), st.sets(st.integers(0, 4), min_size=1).map(lambda turns: (*sorted(turns),)))


@settings(deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=5),
    way=st.sampled_from([Way.STAGED, Way.KERNEL]),
    kinds=st.sampled_from([(HOST, DEVICE), (DEVICE, HOST)]),
)
def test_whatever_series_move_by_the_kernel_every_byte_is_in_place_and_every_part_counted_in_its_turn(
    shapes, way, kinds
):
    device = HostDevice()
    mover, memory = mover_of(device, only(way), staging=SLOTS * 256), DeviceMemory(device, kinds)
    made = [series_in(memory, blocks, turns) for blocks, turns in shapes]
    flights = mover.submit_all([series for series, _, _ in made])
    for flight, (series, _, _) in zip(flights, made, strict=True):
        flight.wait(SOON_S)
        for pieces in series:
            for source, target in zip(pieces.source.tolist(), pieces.target.tolist(), strict=True):
                assert memory.read(target, 64) == memory.read(source, 64)
    parts = sum(len(turns) for _, turns in shapes)
    assert [entry[3] for entry in device.log if entry[0] == "write"] == list(range(1, parts + 1))
    mover.close(SOON_S)


class Issued:
    """How a mover's programs are run, and the table of each."""

    def __init__(self, mover):
        self.tables, self._run = [], mover._issue.run
        mover._issue = mover._issue._replace(run=self.run)

    def run(self, table, *rest):
        self.tables.append(table)
        self._run(table, *rest)


@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST), (DEVICE,)])
def test_a_load_by_the_kernel_is_one_program_of_as_many_rows_however_many_layers_it_has(device, kinds, monkeypatch):
    monkeypatch.setattr(Desk, "lay", lambda *_: False)  # so that `run` is what runs it
    mover, memory = mover_of(device, KERNELS), DeviceMemory(device, kinds)
    issued = Issued(mover)
    for layers in (1, 32):
        series, ends, wanted = series_in(memory, 5, (*range(layers),))
        mover.submit_all([series])[0].wait(SOON_S)
        assert [memory.read(end, 64) for end in ends] == wanted
    one, many = issued.tables
    assert len(one) == len(many)
    assert sum(entry[0] == "launch" for entry in device.log) == 33
    mover.close(SOON_S)


@pytest.mark.parametrize("way", Way)
def test_who_submits_writes_the_program_but_the_first_that_is_staged(device, way, monkeypatch):
    """Memory to stage in is taken by the thread that issues: an engine's own does not wait for that."""
    mover, memory, begin, started = mover_of(device, only(way)), DeviceMemory(device, (HOST, DEVICE)), Lane.start, []

    def start(lane, program, ours):
        started.append((ours, threading.current_thread() is threading.main_thread()))
        return begin(lane, program, ours)

    monkeypatch.setattr(Lane, "start", start)
    for _ in range(3):
        for flight in mover.submit_all([series_in(memory, 5, (0, 1, 2))[0] for _ in range(3)]):
            flight.wait(SOON_S)
    assert started == [(way, way is not Way.STAGED), (way, True), (way, True)]
    mover.close(SOON_S)


def test_a_step_of_which_the_kernel_takes_a_part_moves_all_the_same(device):
    """One batch lies askew, so the engine takes the parts of the step that it is in."""
    mover, memory = mover_of(device, KERNELS), DeviceMemory(device, (HOST, DEVICE))
    made = [series_in(memory, 5, (0, 1)) for _ in range(3)]
    source, target = memory.alloc(64), memory.alloc(64)
    memory.write(source, data := os.urandom(64))
    askew = pieces_of((source + 1, target + 3, 7), (source + 9, target + 11, 7))
    issued = Issued(mover)
    for flight in mover.submit_all([*(series for series, _, _ in made), askew]):
        flight.wait(SOON_S)
    assert len(issued.tables) > 1
    assert any(entry[0] == "launch" for entry in device.log)
    assert memory.read(target, 18) == bytes(3) + data[1:8] + bytes(1) + data[9:16]
    for _, ends, wanted in made:
        assert [memory.read(end, 64) for end in ends] == wanted
    mover.close(SOON_S)


@pytest.mark.parametrize(("costs", "kinds"), [(KERNELS, (DEVICE,)), (STAGED, (HOST, DEVICE)), (STAGED, (DEVICE, HOST))])
def test_programs_that_use_a_table_while_others_are_under_way_move_what_is_theirs(costs, kinds):
    """More of them than there are tables, on a device that carries out later what it has been given."""
    device = AsyncDevice(longest=64)
    mover, memory = mover_of(device, costs, staging=SLOTS * 256), DeviceMemory(device, kinds)
    choose = np.random.default_rng(0)
    steps = [
        [series_in(memory, int(choose.integers(2, 9)), (0, 1, 2)) for _ in range(int(choose.integers(1, 4)))]
        for _ in range(3 * TABLES)
    ]
    flights = [mover.submit_all([series for series, _, _ in step]) for step in steps]
    for ours, step in zip(flights, steps, strict=True):
        for flight, (_, ends, wanted) in zip(ours, step, strict=True):
            flight.wait(SOON_S)
            assert [memory.read(end, 64) for end in ends] == wanted
    mover.close(SOON_S)
    device.end()
    assert device.troubles == []
