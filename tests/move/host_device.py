"""A device made of host memory: the driver's calls, carried out at once. It checks the logic round them, not CUDA.

Streams and events are numbers; every call is written down, so that a test can ask what was ordered behind what. For
calls that come back before they are carried out see `async_device`.
"""

import ctypes
import threading
import time
from functools import partial

import numpy as np

from layercast.move.cuda_driver import DEVICE, HOST, PAGEABLE, Calls, Driver
from layercast.move.cuda_issue import plain_issue
from layercast.move.kernels.pieces import PieceKernel, copy_reference
from layercast.move.kernels.pieces_host import plain_scribe

KERNEL = PieceKernel(function=77, threads=256, shared=0, scribe=plain_scribe(), owner=None)


def _array(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


def nothing() -> None: ...


def reaches(word: ctypes.c_uint32, value: int) -> bool:
    """Whether a count that may have wrapped round has come that far."""
    return not (word.value - value) & 0x80000000


def _run_kernel(source, target, length, pieces, chunks, *shifts) -> None:
    columns = [_array(at, pieces) for at in (source, target, length)]
    assert chunks * 16384 >= columns[2].max() * 8
    copy_reference(columns[0] + shifts[0], columns[1] + shifts[1], columns[2] * 8)


class HostDevice:
    """Stands where `cuda_driver.Driver` does."""

    batches = True
    batch_attributes = (0, 0)
    issue = staticmethod(plain_issue)
    """What makes a mover's loop."""
    device, uuid, version = 0, "00ff" * 8, 13000

    def __init__(self, room: int = 1 << 30) -> None:
        self.log: list[tuple[object, ...]] = []
        self.lost = ""
        self.room = room
        self.failing: dict[str, int] = {}
        self.memory: dict[int, tuple[int, int, np.ndarray]] = {}
        self.pinned: dict[int, int] = {}
        self.elsewhere: set[int] = set()
        """Where memory begins that is another device's."""
        self.live: set[int] = set()
        self._lock = threading.Lock()
        self._last = 0
        sizes = {"copy": 4, "copy_batch": 8, "record": 2, "wait": 3, "launch": 11, "write": 4, "hold": 4}
        sizes |= {"sleep": 1, "finish": 1}
        made = {name: self._call(name, size) for name, size in sizes.items()}
        self.calls = Calls(**made)

    def _call(self, name: str, arguments: int):
        def call(*given: int) -> int:
            self.log.append((name, *given))
            if name in self.failing:
                return self.failing[name]
            self._do(*getattr(self, f"_{name}")(*given))
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * arguments)(call)

    # What each call comes to: a stream, and what that has to do. Arguments are read now, as a driver reads them.

    def _do(self, _stream: int, work) -> None:
        work()

    def _copy(self, to: int, from_: int, nbytes: int, stream: int):
        return stream, partial(self._move, [(to, from_, nbytes)])

    def _copy_batch(self, to: int, from_: int, nbytes: int, count: int, _attributes, _indices, _one, stream: int):
        rows = list(zip(*(_array(at, count).tolist() for at in (to, from_, nbytes)), strict=True))
        return stream, partial(self._move, rows)

    def _record(self, event: int, stream: int):
        assert event in self.live
        return stream, nothing

    def _wait(self, stream: int, event: int, _flags: int):
        assert event in self.live
        return stream, nothing

    def _sleep(self, event: int):
        assert event in self.live
        return 0, nothing

    def _finish(self, _stream: int):
        return 0, nothing

    def _write(self, stream: int, address: int, value: int, _flags: int):
        return stream, partial(self._set, ctypes.c_uint32.from_address(address), value & 0xFFFFFFFF)

    def _hold(self, stream: int, address: int, value: int, _flags: int):
        return stream, partial(self._until, partial(reaches, ctypes.c_uint32.from_address(address), value))

    def _launch(self, function, _x, _y, _z, _threads, _by, _bz, _shared, stream, parameters, _extra):
        assert function == KERNEL.function
        values = [int(_array(at, 1)[0]) for at in _array(parameters, 7).tolist()]
        return stream, partial(_run_kernel, *values)

    def _move(self, rows: list[tuple[int, int, int]]) -> None:
        for row in rows:
            ctypes.memmove(*row)

    def _set(self, word: ctypes.c_uint32, value: int) -> None:
        if "sleep" not in self.failing:  # a device that has gone wrong counts nothing
            word.value = value

    def _until(self, holds) -> None:
        """A stream stands still here; what it waits for runs on another thread."""
        deadline = time.monotonic() + 5
        while not holds():
            assert time.monotonic() < deadline, "nothing here would ever come to it"
            time.sleep(0.001)

    def bind(self) -> None: ...

    check, failure = Driver.check, Driver.failure
    name_of = staticmethod(str)

    def _new(self) -> int:
        with self._lock:
            self._last += 1
            self.live.add(self._last)
            return self._last

    def stream(self, *, urgent: bool) -> int:
        return self._new()

    def drop_stream(self, stream: int) -> None:
        self.live.remove(stream)

    def event(self) -> int:
        return self._new()

    def drop_event(self, event: int) -> None:
        self.live.remove(event)

    def record(self, event: int, stream: int) -> None:
        self.check("record", self.calls.record(event, stream))

    def stream_writes_value(self, stream: int, address: int, value: int) -> None:
        self.check("write", self.calls.write(stream, address, value, 0))

    def happened(self, event: int) -> bool:
        return True

    def stream_waits_for_value(self, stream: int, address: int, value: int) -> None:
        self.check("hold", self.calls.hold(stream, address, value, 0))

    def sleep_until(self, event: int) -> None:
        self.check("sleeping", self.failing.get("sleep", 0))
        self._do(*self._sleep(event))

    def kind_of(self, address: int) -> int:
        if any(first <= address < first + size for first, size in list(self.pinned.items())):
            return HOST
        kinds = [kind for base, (kind, size, _) in list(self.memory.items()) if base <= address < base + size]
        return kinds[0] if kinds else PAGEABLE

    def device_of(self, address: int) -> int:
        far = any(base <= address < base + self.memory[base][1] for base in self.elsewhere)
        return 1 if far else self.device

    def reach(self, device: int) -> None: ...

    def _take(self, kind: int, nbytes: int) -> int:
        if nbytes > self.room:
            self.check(f"{nbytes} bytes", 2)
        array = np.zeros(nbytes + 256, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self.memory[address] = (kind, nbytes, array)
        return address

    def host_memory(self, nbytes: int) -> int:
        return self._take(HOST, nbytes)

    def device_memory(self, nbytes: int) -> int:
        return self._take(DEVICE, nbytes)

    def drop_host_memory(self, address: int) -> None:
        del self.memory[address]

    drop_device_memory = drop_host_memory

    def pin(self, address: int, nbytes: int) -> None:
        self.check("pinning", self.failing.get("pin", 0) if len(self.pinned) >= 2 else 0)
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


class DeviceMemory:
    """What law books allocate from: one kind of a device's memory, or both in turn."""

    def __init__(self, device: HostDevice, kinds: tuple[int, ...]) -> None:
        self._device = device
        self._kinds = kinds
        self._made = 0

    def alloc(self, nbytes: int) -> int:
        kind = self._kinds[self._made % len(self._kinds)]
        self._made += 1
        return self._device.device_memory(nbytes) if kind == DEVICE else self._device.host_memory(nbytes)

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))
