"""What goes in the background goes apart from the rest of its direction, and stands aside for it."""

import os

import numpy as np
import pytest
from async_device import AsyncDevice
from host_device import KERNEL, DeviceMemory, HostDevice
from test_cuda_mover import KERNELS, STAGED, mover_of

from layercast.move.base import Waits
from layercast.move.costs import Direction
from layercast.move.cpu import CpuMover
from layercast.move.cuda_driver import DEVICE, HOST
from layercast.testing.move_laws import SOON_S, pieces_of

SIZE, BLOCKS = 1 << 12, 400
UP = Direction.UP


@pytest.fixture
def device():
    device = AsyncDevice(gb_s=SIZE * 1e3 / 1e9)
    yield device
    device.close()


@pytest.fixture
def mover(device):
    mover = mover_of(device, {}, None)
    yield mover
    mover.close(SOON_S)


class Loads:
    """Loads of so many blocks each, whose bytes can be told apart."""

    def __init__(self, device):
        self.memory, self.due = DeviceMemory(device, (HOST, DEVICE)), []

    def of(self, blocks):
        source, target = self.memory.alloc(SIZE * blocks), self.memory.alloc(SIZE * blocks)
        data = os.urandom(SIZE * blocks)
        self.memory.write(source, data)
        self.due.append((target, data))
        return pieces_of(*((source + SIZE * at, target + SIZE * at, SIZE) for at in range(blocks)))

    def right(self):
        return all(self.memory.read(target, len(data)) == data for target, data in self.due)


@pytest.mark.parametrize("waits", [Waits.IDLE, Waits.BUSY])
def test_what_a_forward_waits_for_has_landed_long_before_the_background_it_came_behind(device, mover, waits):
    loads = Loads(device)
    (slow,) = mover.submit_all([loads.of(BLOCKS)], waits=Waits.NOBODY)
    (quick,) = mover.submit_all([loads.of(8)], waits=waits)
    quick.wait(SOON_S)
    assert not slow.done
    target, data = loads.due[0]
    come = np.frombuffer(loads.memory.read(target, len(data)), np.uint8)
    assert np.count_nonzero(come) < len(data) // 2
    slow.wait(SOON_S)
    assert loads.right()


def test_the_background_keeps_an_order_of_its_own(device, mover):
    loads = Loads(device)
    flights = [mover.submit_all([loads.of(20)], waits=Waits.NOBODY)[0] for _ in range(4)]
    for nth, flight in enumerate(flights):
        flight.wait(SOON_S)
        assert all(one.done for one in flights[:nth])
    assert loads.right()


def test_what_waits_for_the_background_though_that_stands_aside_for_it_comes_to_its_end(device, mover):
    loads = Loads(device)
    (slow,) = mover.submit_all([loads.of(BLOCKS)], waits=Waits.NOBODY)
    (quick,) = mover.submit_all([loads.of(8)], after=[[slow]])
    quick.wait(SOON_S)
    assert slow.done
    assert loads.right()


def test_a_mover_is_closed_once_its_background_is_over(device):
    loads, mover = Loads(device), mover_of(device, {}, None)
    flights = [
        *mover.submit_all([loads.of(40)], waits=Waits.NOBODY),
        *mover.submit_all([loads.of(40)]),
        *mover.submit_all([loads.of(40)], waits=Waits.NOBODY),
    ]
    mover.close(SOON_S)
    assert [flight.done for flight in flights] == [True] * 3
    assert loads.right()


@pytest.mark.parametrize("costs", [{}, STAGED, KERNELS])
def test_the_background_goes_by_the_same_costs_in_less_memory(costs):
    device = HostDevice()
    mover = mover_of(device, {}, KERNEL, staging=27 * SIZE)
    first, loads = mover._arm(UP), Loads(device)
    before = mover.staging_bytes
    for flight in mover.submit_all([loads.of(20)], waits=Waits.NOBODY):
        flight.wait(SOON_S)
    mover.prefer(costs)
    behind = mover._arm(UP, background=True)
    assert behind.lane.costs is first.lane.costs
    assert behind.lane.staging.slot_bytes == first.lane.staging.slot_bytes // 3
    assert mover.staging_bytes > before
    (flight,) = mover.submit_all([loads.of(7)], waits=Waits.NOBODY)
    flight.wait(SOON_S)
    assert loads.right()
    mover.close(SOON_S)


def test_who_has_no_background_takes_it_as_any_other():
    mover, source, target = CpuMover(), np.arange(8), np.zeros(8, np.int64)
    (flight,) = mover.submit_all([pieces_of((source.ctypes.data, target.ctypes.data, 64))], waits=Waits.NOBODY)
    flight.wait(SOON_S)
    assert (source == target).all()
    mover.close(SOON_S)
