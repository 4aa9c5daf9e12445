"""The reference store: objects in this process's memory, the least recently used evicted first.

Does not know what the bytes are.
"""

from collections.abc import Callable, Sequence

from layercast.errors import Missing
from layercast.store.base import ReadHandle
from layercast.store.buffered import BufferedRead, BufferedStore
from layercast.store.ledger import missing


class MemoryStore(BufferedStore):
    """At most `capacity` bytes of objects, those being written included. clock: seconds, never going back."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        super().__init__(capacity, clock)
        self._objects: dict[bytes, bytearray] = {}
        """Bytes of what the ledger counts; an object's identity is its generation."""

    @property
    def used(self) -> int:
        """Bytes of committed objects and of open writes."""
        return self._ledger.used

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Store.present`."""
        with self._lock:
            self._check_open()
            return [key in self._objects for key in keys]

    def open_read(self, keys: Sequence[bytes], lease_s: float) -> ReadHandle:
        """See `Store.open_read`."""
        with self._lock:
            self._check_open()
            absent = [key for key in keys if key not in self._objects]
            if absent:
                raise missing(absent, len(keys))
            objects = tuple(self._objects[key] for key in keys)
            sizes = tuple(map(len, objects))
            deadline = self.clock() + lease_s
            handle = BufferedRead(self, tuple(keys), sizes, deadline, lambda i: self._current(keys[i], objects[i]))
            self._ledger.lease(handle, keys[::-1], handle.deadline)
            return handle

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            self._closed = True
            for key in list(self._objects):
                self._drop(key)

    def admit(self, keys: Sequence[bytes], objects: Sequence[bytearray]) -> None:
        """Take over written objects and their room, for a write handle; the first commit of a key stays."""
        with self._lock:
            self._check_open()
            for key, data in zip(keys, objects, strict=True):
                self._ledger.used -= len(data)
                if key not in self._objects:
                    self._objects[key] = data
                    self._ledger.add(key, len(data))

    def _current(self, key: bytes, opened: bytearray) -> bytearray:
        """The object that was opened, if it is still what `key` names."""
        with self._lock:
            self._check_open()
            if self._objects.get(key) is not opened:
                raise Missing(f"object {key.hex()} was lost during its lease; recompute it")
            return opened

    def _drop(self, key: bytes) -> None:
        self._objects.pop(key, None)
        self._ledger.drop(key)
