"""Every call into the CUDA driver, by ctypes over libcuda: the one file to port for another accelerator.

Pointers, handles and sizes are plain integers. Does not know pieces, flights or gates. Importable anywhere; only making
a `Driver` needs a device. All arguments are declared as 64-bit integers, so that a compiled loop can call the very same
function pointers (see cuda_issue); the driver reads the low half where it wants 32 bits.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, partial

from layercast.errors import DeviceFailed, OutOfMemory, Refused

HOST, DEVICE, PAGEABLE = 1, 2, 0
"""Where an address lies: pinned host memory, device memory, or host memory the device can't reach by itself."""
_NO_MEMORY, _NOT_READY, _UNSUPPORTED = 2, 600, 801
_FATAL = {214, 220, 700, 702, 709, 710, *range(714, 720)}
"""Memory or links that failed, and kernels that went wrong: every later call in the process fails likewise."""
_BLOCKING_SYNC, _DISABLE_TIMING, _NON_BLOCKING, _PORTABLE = 1, 2, 1, 1
_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9
_ALREADY_REACHED = 704
_STREAM_ORDER, _BESIDE_COMPUTE = 1, 1

Call = Callable[..., int]


def libc(name: str, arguments: int, *, keeping: bool) -> Call:
    """libc's call of that name. keeping: it keeps the interpreter lock, as it ends at once."""
    return _typed(name, arguments, (ctypes.PyDLL if keeping else ctypes.CDLL)(None), ctypes.c_int64)


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """The calls that programs are made of; each returns 0 or an error code.

    copy(to, from, bytes, stream);
    copy_batch(to[], from[], bytes[], count, attributes, attribute indices, 1, stream);
    record(event, stream); wait(stream, event, 0);
    sleep(event), finish(stream): block until it has happened, or all that the stream has is done;
    launch(function, grid x, y, z, block x, y, z, shared bytes, stream, parameters, 0);
    write and hold(stream, address, value, 0): set a 32-bit word in stream order, or wait until it is at least `value`,
    where the difference of the two counts as signed; fetch(to, from, bytes): libc's memcpy;
    rest(microseconds): libc's usleep; ring and hear(file, address, bytes): libc's write and read (see `cuda_bell`).
    """

    copy: Call
    copy_batch: Call
    record: Call
    wait: Call
    sleep: Call
    finish: Call
    launch: Call
    write: Call
    hold: Call
    fetch: Call = field(default_factory=partial(libc, "memcpy", 3, keeping=True))
    rest: Call = field(default_factory=partial(libc, "usleep", 1, keeping=False))
    ring: Call = field(default_factory=partial(libc, "write", 3, keeping=True))
    hear: Call = field(default_factory=partial(libc, "read", 3, keeping=False))


BESIDE_SINCE = 13010
"""The driver's version from which on it does as it is told of compute (CUDA 13.1's release notes). Older ones use copy
engines between memories anyhow."""


class Batched(IntEnum):
    """How copies are handed over."""

    NO = 0
    """One by one."""
    FAST = 1
    """In calls of many, for the driver to move as it likes: inside a device by its multiprocessors."""
    BESIDE = 2
    """In calls of many, by copy engines, so that compute keeps the multiprocessors."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: read sources in stream order, no hints of where these are; flags: whether beside compute."""

    _fields_ = [(name, ctypes.c_int) for name in ("order", "source", "source_id", "target", "target_id", "flags")]


ATTRIBUTES_BYTES = ctypes.sizeof(_Attributes)
_ATTRIBUTES = (_Attributes * 2)(*(_Attributes(_STREAM_ORDER, 0, 0, 0, 0, flags) for flags in (0, _BESIDE_COMPUTE)))
_FIRST = ctypes.c_size_t(0)
"""The attributes of all pieces, by `Batched` from FAST on, and the number of the first piece that they are of."""


@cache
def _library() -> ctypes.CDLL:
    """The driver's library, loaded once: all devices of a process have the same calls, so one compiled loop does."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def _calls() -> Calls:
    library = _library()
    batch = _typed("cuMemcpyBatchAsync_v2", 8, library) if hasattr(library, "cuMemcpyBatchAsync_v2") else None
    return Calls(
        copy=_typed("cuMemcpyAsync", 4, library),
        copy_batch=batch or _typed("cuMemcpyBatchAsync", 8, library),
        record=_typed("cuEventRecord", 2, library),
        wait=_typed("cuStreamWaitEvent", 3, library),
        sleep=_typed("cuEventSynchronize", 1, library),
        finish=_typed("cuStreamSynchronize", 1, library),
        launch=_typed("cuLaunchKernel", 11, library),
        write=_typed("cuStreamWriteValue32_v2", 4, library),
        hold=_typed("cuStreamWaitValue32_v2", 4, library),
    )


def _typed(name: str, arguments: int, library: ctypes.CDLL, result: type = ctypes.c_int) -> Call:
    call = getattr(library, name)
    call.restype, call.argtypes = result, [ctypes.c_int64] * arguments
    return call  # type: ignore[no-any-return]


class Driver:
    """One device's primary context. Every thread that calls must `bind` first. Methods raise DeviceFailed."""

    def __init__(self, device: int = 0) -> None:
        try:
            self._lib = _library()
        except OSError as error:
            raise Refused(f"no CUDA driver here ({error}); use the CPU mover, or install NVIDIA's driver") from error
        self.lost = ""
        """Why nothing works on this device any more in this process; empty while it does."""
        self.check("cuInit", self._lib.cuInit(0))
        self.device = device
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self.check("cuDeviceGet", self._lib.cuDeviceGet(ctypes.byref(handle), device))
        self.check("cuDevicePrimaryCtxRetain", self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        self._context = context
        self._handle = handle
        self.calls = _calls()
        # Calls by `_quick` keep the interpreter lock: they end in microseconds, and taking it again beside a busy
        # thread costs milliseconds.
        self._quick = ctypes.PyDLL(None, handle=self._lib._handle)
        self._query = _typed("cuEventQuery", 1, self._lib)
        self._hold = _typed("cuStreamWaitValue32_v2", 4, self._quick)
        self._record = _typed("cuEventRecord", 2, self._quick)
        self.bind()

    def bind(self) -> None:
        """Make the context current on the calling thread."""
        self.check("cuCtxSetCurrent", self._quick.cuCtxSetCurrent(self._context))

    def check(self, what: str, code: int) -> None:
        """Raise DeviceFailed, or OutOfMemory, unless `code` is 0."""
        if code != 0:
            raise self.failure(what, code)

    def failure(self, what: str, code: int) -> OutOfMemory | DeviceFailed:
        """What an error code comes to; of some the device is `lost`."""
        text = f"{what} failed: {self.name_of(code)}"
        if code == _NO_MEMORY:
            return OutOfMemory(f"{text}; lower gpu_staging_bytes or host_bytes, or free memory")
        if code in _FATAL:
            self.lost = self.lost or f"{text}, so nothing works on this device any more; restart the engine"
            return DeviceFailed(self.lost)
        return DeviceFailed(f"{text}; the copy did not happen, and a device that keeps failing needs a new process")

    def name_of(self, code: int) -> str:
        """The driver's name of an error code."""
        text = ctypes.c_char_p()
        self._lib.cuGetErrorName(code, ctypes.byref(text))
        return f"{(text.value or b'an unknown error').decode()} ({code})"

    def stream(self, *, urgent: bool) -> int:
        """A new stream that ignores the legacy default one; urgent: its kernels go before those of other streams."""
        least, most, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self.check(
            "cuCtxGetStreamPriorityRange",
            self._lib.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(most)),
        )
        made = self._lib.cuStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, most if urgent else least)
        self.check("cuStreamCreateWithPriority", made)
        return stream.value or 0

    def drop_stream(self, stream: int) -> None:
        """Give a stream back once its work is done."""
        self.check("cuStreamDestroy", self._lib.cuStreamDestroy_v2(ctypes.c_void_p(stream)))

    def event(self) -> int:
        """A new event without timing, on which a thread can sleep."""
        event = ctypes.c_void_p()
        made = self._lib.cuEventCreate(ctypes.byref(event), _BLOCKING_SYNC | _DISABLE_TIMING)
        self.check("cuEventCreate", made)
        return event.value or 0

    def drop_event(self, event: int) -> None:
        """Give an event back; what waits for it on a stream goes on waiting."""
        self._lib.cuEventDestroy_v2(ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        """Have the event happen when what the stream has by now is done."""
        self.check("cuEventRecord", self._record(event, stream))

    def happened(self, event: int) -> bool:
        """Whether the work before the event's last record is done."""
        code = self._query(event)
        if code != _NOT_READY:
            self.check("cuEventQuery", code)
        return code == 0

    def sleep_until(self, event: int) -> None:
        """Block this thread, not the interpreter, until the event has happened."""
        self.check("cuEventSynchronize", self.calls.sleep(event))

    def stream_waits_for_value(self, stream: int, address: int, value: int) -> None:
        """Hold the stream until the 32-bit word at `address` is at least `value`. May be captured in a graph."""
        self.check("cuStreamWaitValue32", self._hold(stream, address, value, 0))

    def stream_writes_value(self, stream: int, address: int, value: int) -> None:
        """Write a 32-bit word in stream order. May be captured in a graph."""
        self.check("cuStreamWriteValue32", self.calls.write(stream, address, value, 0))

    def kind_of(self, address: int) -> int:
        """HOST, DEVICE, or PAGEABLE for memory that this driver has not been told of."""
        kind = ctypes.c_uint(0)
        code = self._quick.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
        return int(kind.value) if code == 0 else PAGEABLE

    def device_of(self, address: int) -> int:
        """The number of the device whose memory the address lies in, or near for pinned memory; -1 for other memory."""
        device = ctypes.c_int(-1)
        code = self._quick.cuPointerGetAttribute(ctypes.byref(device), _DEVICE_ORDINAL, ctypes.c_uint64(address))
        return int(device.value) if code == 0 else -1

    def reach(self, device: int) -> None:
        """Let this device read and write another one's memory. Raises Refused where no link allows it."""
        able, other, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self.check("cuDeviceGet", self._lib.cuDeviceGet(ctypes.byref(other), device))
        self.check("cuDeviceCanAccessPeer", self._lib.cuDeviceCanAccessPeer(ctypes.byref(able), self._handle, other))
        if not able.value:
            raise Refused(f"device {self.device} does not reach device {device}'s memory; copy by way of the host")
        self.check("cuDevicePrimaryCtxRetain", self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), other))
        self.bind()
        code = self._lib.cuCtxEnablePeerAccess(context, 0)
        if code != _ALREADY_REACHED:
            self.check("cuCtxEnablePeerAccess", code)

    @property
    def batch_attributes(self) -> tuple[int, int]:
        """Addresses of the attributes (by `Batched` from FAST on, ATTRIBUTES_BYTES each) and of their index, as
        `copy_batch` wants them."""
        return ctypes.addressof(_ATTRIBUTES), ctypes.addressof(_FIRST)

    @property
    def uuid(self) -> str:
        """The device's own 16 bytes, in hexadecimal: the same in every process and after every restart."""
        raw = (ctypes.c_ubyte * 16)()
        self.check("cuDeviceGetUuid", self._lib.cuDeviceGetUuid_v2(raw, self._handle))
        return bytes(raw).hex()

    @property
    def pci(self) -> str:
        """Its address on the PCI bus, such as 0000:3b:00.0."""
        text = ctypes.create_string_buffer(32)
        self.check("cuDeviceGetPCIBusId", self._lib.cuDeviceGetPCIBusId(text, len(text), self._handle))
        return text.value.decode()

    @property
    def version(self) -> int:
        """The driver's CUDA version: 13000 is 13.0."""
        version = ctypes.c_int()
        self.check("cuDriverGetVersion", self._lib.cuDriverGetVersion(ctypes.byref(version)))
        return int(version.value)

    def host_memory(self, nbytes: int) -> int:
        """Address of new pinned host memory. Raises OutOfMemory."""
        address = ctypes.c_void_p()
        made = self._lib.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), _PORTABLE)
        self.check(f"pinning {nbytes} bytes", made)
        return address.value or 0

    def drop_host_memory(self, address: int) -> None:
        """Free what `host_memory` gave."""
        self.check("cuMemFreeHost", self._lib.cuMemFreeHost(ctypes.c_void_p(address)))

    def device_memory(self, nbytes: int) -> int:
        """Address of new device memory. Raises OutOfMemory."""
        address = ctypes.c_uint64()
        made = self._lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.check(f"{nbytes} bytes of device memory", made)
        return int(address.value)

    def drop_device_memory(self, address: int) -> None:
        """Free what `device_memory` gave."""
        self.check("cuMemFree", self._lib.cuMemFree_v2(ctypes.c_uint64(address)))

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, so that the device can copy from and to it by itself."""
        code = self._lib.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE)
        self.check(f"pinning {nbytes} bytes", code)

    def unpin(self, address: int) -> None:
        """Undo `pin`, by the address it was given."""
        self.check("cuMemHostUnregister", self._lib.cuMemHostUnregister(ctypes.c_void_p(address)))

    @property
    def batches(self) -> bool:
        """Whether one call can copy many pieces (drivers of CUDA 13 and later)."""
        return hasattr(self._lib, "cuMemcpyBatchAsync_v2")


def device_holding(address: int) -> int | None:
    """The number of the device whose memory the address lies in; None for host memory, or where there is no driver.

    Makes no context on any device, so it may be asked in a process that never uses one.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = []
    for attribute in (_MEMORY_TYPE, _DEVICE_ORDINAL):
        value = ctypes.c_int(0)
        code = library.cuInit(0) or library.cuPointerGetAttribute(
            ctypes.byref(value), attribute, ctypes.c_uint64(address)
        )
        found.append(value.value if code == 0 else PAGEABLE)
    kind, device = found
    return device if kind == DEVICE else None
