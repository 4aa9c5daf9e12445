"""Bells: how one thread wakes another that sleeps without the interpreter lock, either of them in compiled code.

A bell is an event file of the kernel's, which counts rings. Does not know what the news is.
"""

import ctypes
import os
import select
from contextlib import suppress

from layercast.errors import Refused
from layercast.move.cuda_driver import Call


class Bell:
    """Rung by any thread; all rings are heard at once: by a loop that sleeps until there is one (`sleeping`), or by
    `heard`."""

    __slots__ = ("_one", "_ring", "file", "one")

    def __init__(self, ring: Call, *, sleeping: bool) -> None:
        if not hasattr(os, "eventfd"):
            raise Refused("this system has no event files, so nothing can wake the threads of a GPU; use Linux")
        try:
            self.file: int = os.eventfd(0, os.EFD_CLOEXEC | (0 if sleeping else os.EFD_NONBLOCK))
        except OSError as error:
            raise Refused(f"no event file for a GPU's threads ({error}); raise the limit of open files") from error
        self._ring = ring
        self._one = ctypes.c_uint64(1)
        self.one = ctypes.addressof(self._one)
        """The address of what is written to the file to ring it: 8 bytes."""

    def ring(self) -> None:
        """Wake who listens, or will. Keeps the interpreter lock. Rings nothing once closed."""
        self._ring(self.file, self.one, 8)

    def heard(self, timeout_s: float) -> bool:
        """Whether it has been rung since it was last heard; waits up to `timeout_s` seconds. Not if `sleeping`.

        Once closed it is not heard any more.
        """
        asked = select.poll()  # its own, as no two threads may ask one
        if self.file < 0:
            return False
        asked.register(self.file, select.POLLIN)
        rung = bool(asked.poll(max(0.0, 1000 * timeout_s))) and self.file >= 0
        if rung:
            with suppress(BlockingIOError):  # another who listens was first
                os.read(self.file, 8)
        return rung

    def close(self) -> None:
        """Give the file back; who listens hears nothing. Its number may be another file's from now on."""
        file, self.file = self.file, -1
        os.close(file)
