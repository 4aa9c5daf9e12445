"""The laws of movers over a device that carries its calls out later, and what that device does as a real one."""

import ctypes
import threading
import time
from functools import partial

import pytest
from async_device import AsyncDevice
from host_device import KERNEL, DeviceMemory
from test_cuda_mover import KERNELS

from layercast.move.cuda import CudaMover
from layercast.move.cuda_driver import DEVICE, HOST
from layercast.move.cuda_issue import plain_issue
from layercast.testing.move_laws import BRIEF_S, SOON_S, MoverLaws


class OnAsyncDevice(MoverLaws):
    costs = {}

    @pytest.fixture(autouse=True)
    def device(self):
        self.device = AsyncDevice(longest=64)
        yield self.device
        self.device.end()
        assert self.device.troubles == []

    def make_mover(self):
        issue = plain_issue(self.device.calls, self.device.batch_attributes)
        mover = CudaMover(self.device, KERNEL, issue, lambda: self.device.compute, 3 << 16)
        mover.prefer(self.costs)
        return mover

    @pytest.fixture
    def memory(self, mover):
        return DeviceMemory(self.device, (DEVICE,))

    def slow_write(self, mover, memory, address, data):
        """Kernels on the current stream, which write a part each."""
        step = len(data) // 4
        for at in range(0, len(data), step):
            self.device.launch(partial(memory.write, address + at, data[at : at + step]), seconds=0.0001)
        return mover.mark()


class TestByCopyEngine(OnAsyncDevice): ...


class TestByKernel(OnAsyncDevice):
    costs = KERNELS


@pytest.fixture
def device():
    device = AsyncDevice(longest=8, gb_s=1e-3, patience_s=4 * BRIEF_S)
    yield device
    device.end()


@pytest.fixture
def word(device):
    return ctypes.c_uint32.from_address(device.host_memory(64))


def test_a_copy_takes_its_time_and_moves_its_bytes_at_the_end_while_whoever_asked_for_it_goes_on(device):
    memory, stream, event = DeviceMemory(device, (HOST, DEVICE)), device.stream(urgent=True), device.event()
    source, target, start = memory.alloc(1 << 16), memory.alloc(1 << 16), time.monotonic()
    memory.write(source, b"x" * (1 << 16))
    device.calls.copy(target, source, 1 << 16, stream)
    device.record(event, stream)
    assert not device.happened(event)
    assert memory.read(target, 1) == b"\0"
    device.sleep_until(event)
    assert time.monotonic() - start >= 0.06
    assert memory.read(target, 1 << 16) == b"x" * (1 << 16)
    device.drop_stream(stream)


def test_a_stream_goes_on_once_a_word_or_an_event_of_another_lets_it(device, word):
    other, event, seen = device.stream(urgent=True), device.event(), []
    device.stream_waits_for_value(other, ctypes.addressof(word), 1)
    device.record(event, other)
    device.calls.wait(device.compute, event, 0)
    device.launch(lambda: seen.append("compute"))
    assert (device.happened(event), seen) == (False, [])
    third = device.stream(urgent=True)
    device.stream_writes_value(third, ctypes.addressof(word), 1)
    device.synchronize()
    assert (device.happened(event), seen, device.troubles) == (True, ["compute"], [])
    device.drop_stream(other)
    device.drop_stream(third)


def test_a_launch_that_waits_for_room_keeps_everybody_from_the_driver(device, word):
    """So what the full stream waits for must have been handed over before."""
    other = device.stream(urgent=True)
    device.stream_waits_for_value(device.compute, ctypes.addressof(word), 1)
    launching = threading.Thread(target=lambda: [device.launch() for _ in range(16)])
    launching.start()
    time.sleep(BRIEF_S)
    device.stream_writes_value(other, ctypes.addressof(word), 1)
    assert device.troubles, "the driver lets nobody in before the launch, or what its stream waits for, is given up"
    launching.join(SOON_S)
    device.drop_stream(other)
