"""What law books share: memory that is allocated, written and read by address, and something that is kept alive.

A device's law subclass replaces the memory with its own.
"""

import ctypes
import threading
import weakref

import numpy as np

SOON_S = 10.0
"""Longest that a law waits for what must happen."""


class Kept:
    """Something to keep alive, whose end can be waited for."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        weakref.finalize(self, self.gone.set)


class HostMemory:
    """Ordinary memory of this process, kept until the object goes."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    def alloc(self, nbytes: int) -> int:
        """Address of new memory of zeros, aligned to 64 bytes."""
        array = np.zeros(nbytes + 64, np.uint8)
        self._arrays.append(array)
        return -(-array.ctypes.data // 64) * 64

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes there."""
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        """Put bytes there."""
        ctypes.memmove(address, data, len(data))
