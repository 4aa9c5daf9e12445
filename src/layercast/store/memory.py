"""The reference store: objects in this process's memory, the least recently used evicted first.

Does not know what the bytes are.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from layercast.errors import BadTransition, DeadlineExceeded, Full, Missing, Refused
from layercast.store.base import Buffer, ReadHandle, Store, WriteHandle
from layercast.store.coverage import Coverage

NAMED_KEYS = 3
"""How many absent keys a message spells out."""


@dataclass(slots=True, eq=False)
class _Object:
    """One object; its identity is its generation. leases: deadlines of the reads that are open on it."""

    data: bytearray
    leases: "dict[_Read, float]" = field(default_factory=dict)

    def held(self, now: float) -> bool:
        return any(deadline > now for deadline in self.leases.values())


class MemoryStore(Store):
    """At most `capacity` bytes of objects, those being written included. clock: seconds, never going back."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.capacity = capacity
        self.used = 0
        """Bytes of committed objects and of open writes."""
        self.clock = clock
        self._lock = Lock()
        self._objects: OrderedDict[bytes, _Object] = OrderedDict()
        self._closed = False

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Store.present`."""
        with self._lock:
            self._check_open()
            return [key in self._objects for key in keys]

    def open_write(self, keys: Sequence[bytes], sizes: Sequence[int]) -> WriteHandle:
        """See `Store.open_write`."""
        if len(keys) != len(sizes) or len(set(keys)) != len(keys) or any(size < 1 for size in sizes):
            raise Refused(f"{len(set(keys))} distinct keys of {len(keys)}, {len(sizes)} sizes; each at least 1 byte")
        with self._lock:
            self._check_open()
            self._make_room(sum(sizes))
            self.used += sum(sizes)
        return _Write(self, tuple(keys), tuple(sizes))

    def open_read(self, keys: Sequence[bytes], lease_s: float) -> ReadHandle:
        """See `Store.open_read`."""
        with self._lock:
            self._check_open()
            absent = [key for key in keys if key not in self._objects]
            if absent:
                named = ", ".join(key.hex() for key in absent[:NAMED_KEYS])
                more = f" and {len(absent) - NAMED_KEYS} more" if len(absent) > NAMED_KEYS else ""
                raise Missing(f"{len(absent)} of {len(keys)} objects are not in the store: {named}{more}")
            objects = tuple(self._objects[key] for key in keys)
            handle = _Read(self, tuple(keys), objects, self.clock() + lease_s)
            for key, found in zip(keys, objects, strict=True):
                found.leases[handle] = handle.deadline
                self._objects.move_to_end(key)
            return handle

    def evict(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Store.evict`."""
        with self._lock:
            self._check_open()
            now = self.clock()
            for key in keys:
                if key in self._objects and not self._objects[key].held(now):
                    self._drop(key)
            return [key not in self._objects for key in keys]

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            self._closed = True
            self._objects.clear()
            self.used = 0

    def admit(self, keys: Sequence[bytes], objects: Sequence[bytearray]) -> None:
        """Take over written objects and their room, for a write handle; the first commit of a key stays."""
        with self._lock:
            self._check_open()
            for key, data in zip(keys, objects, strict=True):
                if key in self._objects:
                    self.used -= len(data)
                else:
                    self._objects[key] = _Object(data)

    def give_back(self, size: int) -> None:
        """End the room of a revoked write, for a write handle."""
        with self._lock:
            if not self._closed:
                self.used -= size

    def let_go(self, handle: "_Read", objects: Sequence[_Object]) -> None:
        """End a read's lease, for a read handle."""
        with self._lock:
            for found in objects:
                found.leases.pop(handle, None)

    def current(self, key: bytes) -> _Object | None:
        """What `key` names now, for a read handle."""
        with self._lock:
            self._check_open()
            return self._objects.get(key)

    def _make_room(self, size: int) -> None:
        now = self.clock()
        excess = self.used + size - self.capacity
        victims = []
        for key, found in self._objects.items():
            if excess <= 0:
                break
            if not found.held(now):
                victims.append(key)
                excess -= len(found.data)
        if excess > 0:
            raise Full(f"{size} bytes to write: {excess} too many for a store of {self.capacity}; write fewer")
        for key in victims:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self.used -= len(self._objects.pop(key).data)

    def _check_open(self) -> None:
        if self._closed:
            raise BadTransition("the store is closed; open another one")


class _Write(WriteHandle):
    """Buffers of a batch, and which of their bytes are written."""

    def __init__(self, store: MemoryStore, keys: tuple[bytes, ...], sizes: tuple[int, ...]) -> None:
        self._store = store
        self._keys = keys
        self._sizes = sizes
        self._objects = [bytearray(size) for size in sizes]
        self._coverage = [Coverage(size) for size in sizes]
        self._open = True

    def write(self, index: int, offset: int, data: Buffer) -> None:
        """See `WriteHandle.write`."""
        self._check_open()
        view = memoryview(data).cast("B")
        end = offset + len(view)
        _check_range(self._sizes, index, offset, end)
        self._objects[index][offset:end] = view
        self._coverage[index].add(offset, end)

    def commit(self) -> None:
        """See `WriteHandle.commit`."""
        self._check_open()
        torn = [index for index, coverage in enumerate(self._coverage) if not coverage.whole]
        if torn:
            self.revoke()
            first = self._coverage[torn[0]]
            raise Refused(
                f"{len(torn)} of {len(self._keys)} objects are not whole ({self._keys[torn[0]].hex()}: {first.covered} "
                f"of {first.size} bytes written); the write is revoked"
            )
        self._open = False
        self._store.admit(self._keys, self._objects)

    def revoke(self) -> None:
        """See `WriteHandle.revoke`."""
        if self._open:
            self._open = False
            self._store.give_back(sum(self._sizes))

    def _check_open(self) -> None:
        if not self._open:
            raise BadTransition("this write has been committed or revoked; open another one")


class _Read(ReadHandle):
    """Objects of a batch as they were when it was opened, until the deadline."""

    def __init__(
        self, store: MemoryStore, keys: tuple[bytes, ...], objects: tuple[_Object, ...], deadline: float
    ) -> None:
        self._store = store
        self._keys = keys
        self._objects = objects
        self.deadline = deadline
        self._open = True

    @property
    def sizes(self) -> tuple[int, ...]:
        """See `ReadHandle.sizes`."""
        return tuple(len(found.data) for found in self._objects)

    def read(self, index: int, offset: int, buffer: bytearray | memoryview) -> None:
        """See `ReadHandle.read`."""
        if not self._open:
            raise BadTransition("this read has been closed; open another one")
        self._check_lease()
        view = memoryview(buffer).cast("B")
        end = offset + len(view)
        _check_range(self.sizes, index, offset, end)
        found = self._objects[index]
        if self._store.current(self._keys[index]) is not found:
            raise Missing(f"object {self._keys[index].hex()} was lost during its lease; recompute it")
        view[:] = memoryview(found.data)[offset:end]
        self._check_lease()

    def close(self) -> None:
        """See `ReadHandle.close`."""
        if self._open:
            self._open = False
            self._store.let_go(self, self._objects)

    def _check_lease(self) -> None:
        """A read that outlives its lease may have seen other bytes: checked before and after the copy."""
        now = self._store.clock()
        if now >= self.deadline:
            raise DeadlineExceeded(f"the lease on {len(self._keys)} objects ended {now - self.deadline:.3f} s ago")


def _check_range(sizes: tuple[int, ...], index: int, offset: int, end: int) -> None:
    if not 0 <= index < len(sizes) or not 0 <= offset <= end <= sizes[index]:
        raise Refused(f"bytes [{offset}, {end}) of object {index}: outside of a batch of {len(sizes)} objects {sizes}")
