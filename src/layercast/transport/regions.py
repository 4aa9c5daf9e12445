"""Registered memory, and the check that a peer's ranges lie inside what is open to it.

Does not know connections.
"""

import ctypes
import itertools
import threading
from bisect import bisect_right

from layercast.errors import Malformed, Refused
from layercast.transport.base import Ints, Peer, Region

_TOP = 1 << 62
_NOTHING = Region(0, 0, 0)


class Regions:
    """The regions of one transport, by address. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._starts: list[int] = []
        self._known: list[tuple[Region, object, Peer | None]] = []

    def register(self, address: int, nbytes: int, owner: object, writer: Peer | None) -> Region:
        """A new region, open to `writer` or (None) to all. Raises Refused where it is empty or overlaps another."""
        if address <= 0 or nbytes <= 0 or address + nbytes > _TOP:
            raise Refused(f"{nbytes} bytes at {address:#x} are no memory that can be registered")
        with self._lock:
            at = bisect_right(self._starts, address)
            for other, *_ in self._known[max(0, at - 1) : at + 1]:
                if address < other.address + other.nbytes and other.address < address + nbytes:
                    raise Refused(f"{nbytes} bytes at {address:#x} overlap region {other}; register memory once")
            region = Region(next(self._ids), address, nbytes)
            self._starts.insert(at, address)
            self._known.insert(at, (region, owner, writer))
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region; one that is not known changes nothing."""
        with self._lock:
            at = bisect_right(self._starts, region.address) - 1
            if at >= 0 and self._known[at][0] == region:
                del self._starts[at], self._known[at]

    def claim(self, peer: Peer, address: Ints, length: Ints) -> list[object]:
        """The owners to keep alive while `peer` writes these ranges.

        Raises Malformed unless each lies in one region that is open to the peer.
        """
        if len(address) != len(length) or len(address) == 0:
            raise Malformed(f"{len(address)} addresses for {len(length)} lengths")
        owners = {}
        with self._lock:
            for start, nbytes in zip(address.tolist(), length.tolist(), strict=True):
                at = bisect_right(self._starts, start) - 1
                region, owner, writer = self._known[at] if at >= 0 else (_NOTHING, None, None)
                if not 0 < nbytes <= region.address + region.nbytes - start or writer not in (None, peer):
                    raise Malformed("a peer would write outside the memory that is open to it")
                owners[region.id] = owner
        return list(owners.values())


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
