"""Pins a slab in the background, slice by slice from its start, so that it can be used before all of it is pinned.

What is not pinned yet moves all the same, by way of the driver's own buffers and at a fraction of the speed.
Does not know what lies in the memory.
"""

import ctypes
import logging
import os
import platform
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layercast.errors import DeadlineExceeded, LayercastError
from layercast.move.cuda_driver import Driver

SLICE_BYTES = 256 << 20
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT, _PREFERRED = 0, 1
_log = logging.getLogger("layercast")


class Pinning:
    """Page-locks [address, address + nbytes) from construction on; `close` undoes it.

    slice_bytes: memory pinned in one call; a multiple of the page size.
    """

    def __init__(self, driver: Driver, address: int, nbytes: int, slice_bytes: int = SLICE_BYTES) -> None:
        self._driver = driver
        self._address, self._nbytes = address, nbytes
        self._slices = [(address + first, min(slice_bytes, nbytes - first)) for first in range(0, nbytes, slice_bytes)]
        self._pinned: list[int] = []
        self._stop = threading.Event()
        self.pinned_bytes = 0
        self.refusal = ""
        """Why it stopped short of the end, and what to do; empty if it did not."""
        self._thread = threading.Thread(target=self._pin, name="layercast-cuda-pin", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether all of it is pinned."""
        return self.pinned_bytes == self._nbytes

    def __contains__(self, address: int) -> bool:
        return self._address <= address < self._address + self._nbytes

    @property
    def cuts(self) -> list[int]:
        """Where slices meet: no copy may cross these (see `CudaMover.cut_at`)."""
        return [address for address, _ in self._slices[1:]]

    def wait(self, timeout_s: float) -> None:
        """Block until all is pinned or refused. Raises DeadlineExceeded."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"pinning: {self.pinned_bytes} bytes after {timeout_s:g} s; it goes on")

    def close(self, timeout_s: float) -> None:
        """Stop, and unpin what was pinned. No copy may be under way. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        self.wait(max(0.0, deadline - time.monotonic()))
        self._driver.bind()
        while self._pinned:
            self._driver.unpin(self._pinned.pop())
        self.pinned_bytes = 0

    def _pin(self) -> None:
        try:
            self._driver.bind()
            for address, nbytes in self._slices:
                if self._stop.is_set():
                    return
                self._driver.pin(address, nbytes)
                self._pinned.append(address)
                self.pinned_bytes += nbytes
        except LayercastError as error:
            self.refusal = (
                f"{self.pinned_bytes} of {self._nbytes} bytes of host memory are pinned, then the system refused "
                f"({error}); the rest works, slowly: lower host_bytes, or lock more memory (ulimit -l is {_limit()})"
            )
            _log.warning("%s", self.refusal)


@contextmanager
def near(pci: str, system: Path = Path("/sys")) -> Iterator[int]:
    """What this thread faults in inside the block comes from the NUMA node of the device at this PCI address.

    Where that node is full, from another. Yields the node; -1 where the machine has one only, or does not say.
    """
    node = _node_of(pci, system)
    if node >= 0 and not _prefer(_PREFERRED, node):
        _log.warning("host memory may lie far from the GPU: the system lets nobody choose a NUMA node (set_mempolicy)")
        node = -1
    try:
        yield node
    finally:
        if node >= 0:
            _prefer(_DEFAULT, 0)


def _node_of(pci: str, system: Path) -> int:
    """The device's node, -1 where there is nothing to choose."""
    if len(list((system / "devices/system/node").glob("node[0-9]*"))) < 2:
        return -1
    try:
        return int((system / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _prefer(policy: int, node: int) -> bool:
    """Whether the system took the calling thread's policy for new memory."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or not hasattr(os, "sched_getaffinity"):
        return False
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    arguments = (mask, ctypes.c_ulong(64 * len(mask))) if policy else (None, ctypes.c_ulong(0))
    return bool(ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_int(policy), *arguments) == 0)


def _limit() -> str:
    """The limit on locked memory, as `ulimit -l` shows it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
