"""Registered memory, and the check that a peer's ranges lie inside it.

Does not know peers or connections.
"""

import ctypes
import itertools
import threading

import numpy as np

from layercast.errors import Malformed, Refused
from layercast.transport.base import Ints, Region

_TOP = 1 << 62


class Regions:
    """The regions of one transport. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._known: dict[int, tuple[Region, object]] = {}

    def register(self, address: int, nbytes: int, owner: object) -> Region:
        """A new region. Raises Refused where it is empty or overlaps another."""
        if address <= 0 or nbytes <= 0 or address + nbytes > _TOP:
            raise Refused(f"{nbytes} bytes at {address:#x} are no memory that can be registered")
        with self._lock:
            for other, _ in self._known.values():
                if address < other.address + other.nbytes and other.address < address + nbytes:
                    raise Refused(f"{nbytes} bytes at {address:#x} overlap region {other}; register memory once")
            region = Region(next(self._ids), address, nbytes)
            self._known[region.id] = (region, owner)
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region; one that is not known changes nothing."""
        with self._lock:
            self._known.pop(region.id, None)

    def claim(self, address: Ints, length: Ints) -> list[object]:
        """The owners to keep alive while these ranges are written. Raises Malformed unless each is in one region."""
        if len(address) != len(length) or len(address) == 0:
            raise Malformed(f"{len(address)} addresses for {len(length)} lengths")
        with self._lock:
            known = sorted(self._known.values(), key=lambda entry: entry[0].address)
        starts = np.array([region.address for region, _ in known], np.int64)
        sizes = np.array([region.nbytes for region, _ in known], np.int64)
        index = np.searchsorted(starts, address, "right") - 1
        if index.min() < 0:
            raise Malformed("a peer would write outside the registered memory")
        offset = address - starts[index]
        # Subtractions only, so that no sum of a peer's numbers can overflow.
        if (length <= 0).any() or (offset >= sizes[index]).any() or (length > sizes[index] - offset).any():
            raise Malformed("a peer would write outside the registered memory")
        return [known[i][1] for i in np.unique(index)]


def views(address: Ints, length: Ints) -> list[memoryview]:
    """A writable view of each range. Whoever owns the memory must keep it alive."""
    if len(address) == 0:
        return []
    base = int(address.min())
    nbytes = int((address + length).max()) - base
    # One view over everything: slices of it are far cheaper than a view each. Holes in it are never touched.
    span = memoryview((ctypes.c_char * nbytes).from_address(base)).cast("B")
    starts = (address - base).tolist()
    return [span[first : first + size] for first, size in zip(starts, length.tolist(), strict=True)]
