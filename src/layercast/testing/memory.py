"""Memory for law books: allocated, written and read by address.

A device's law subclass replaces these with its own.
"""

import ctypes

import numpy as np


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
