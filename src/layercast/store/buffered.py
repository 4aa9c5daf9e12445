"""Stores that take and give an object whole: their room and leases, and their batches to write and to read.

Do not know where objects lie.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock

from layercast.errors import BadTransition, DeadlineExceeded, Refused
from layercast.store.base import Buffer, ReadHandle, Store, WriteHandle
from layercast.store.coverage import Coverage
from layercast.store.ledger import Ledger, check_batch, check_range


class BufferedStore(Store):
    """At most `capacity` bytes of objects, those being written included. clock: seconds, never going back."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._lock = Lock()
        self._ledger = Ledger(capacity, clock)
        self._closed = False

    @abstractmethod
    def _drop(self, key: bytes) -> None:
        """Remove an object and forget it. Lock held."""

    def open_write(self, keys: Sequence[bytes], sizes: Sequence[int]) -> WriteHandle:
        """See `Store.open_write`."""
        check_batch(keys, sizes)
        with self._lock:
            self._check_open()
            for key in self._ledger.room_for(sum(sizes)):
                self._drop(key)
            self._ledger.used += sum(sizes)
        return BufferedWrite(self, tuple(keys), tuple(sizes))

    def evict(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Store.evict`."""
        with self._lock:
            self._check_open()
            for key in keys:
                if not self._ledger.held(key):
                    with suppress(OSError):  # whether it is gone is asked below
                        self._drop(key)
        return [not there for there in self.present(keys)]

    @abstractmethod
    def admit(self, keys: Sequence[bytes], objects: Sequence[bytearray]) -> None:
        """Make whole objects visible, and end the room taken for them, whether that succeeds or not."""

    def give_back(self, size: int) -> None:
        """End the room of a batch that is not written any more."""
        with self._lock:
            self._ledger.used -= size

    def let_go(self, handle: "BufferedRead", keys: Sequence[bytes]) -> None:
        """End a read's lease."""
        with self._lock:
            self._ledger.end(handle, keys)

    def _check_open(self) -> None:
        if self._closed:
            raise BadTransition("the store is closed; open another one")


class BufferedWrite(WriteHandle):
    """Buffers of a batch, and which of their bytes are written."""

    def __init__(self, store: BufferedStore, keys: tuple[bytes, ...], sizes: tuple[int, ...]) -> None:
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
        check_range(self._sizes, index, offset, end)
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


class BufferedRead(ReadHandle):
    """Objects of a batch, got whole from `fetch(index)`, until the deadline. The last one read is kept meanwhile."""

    def __init__(
        self,
        store: BufferedStore,
        keys: tuple[bytes, ...],
        sizes: tuple[int, ...],
        deadline: float,
        fetch: Callable[[int], Buffer],
    ) -> None:
        self._store = store
        self._keys = keys
        self._sizes = sizes
        self.deadline = deadline
        self._fetch = fetch
        self._last: tuple[int, Buffer] | None = None
        self._open = True

    @property
    def sizes(self) -> tuple[int, ...]:
        """See `ReadHandle.sizes`."""
        return self._sizes

    def read(self, index: int, offset: int, buffer: bytearray | memoryview) -> None:
        """See `ReadHandle.read`."""
        if not self._open:
            raise BadTransition("this read has been closed; open another one")
        self._check_lease()
        view = memoryview(buffer).cast("B")
        end = offset + len(view)
        check_range(self._sizes, index, offset, end)
        if self._last is None or self._last[0] != index:
            self._last = None
            self._last = index, self._fetch(index)
        view[:] = memoryview(self._last[1])[offset:end]
        self._check_lease()

    def close(self) -> None:
        """See `ReadHandle.close`."""
        if self._open:
            self._open, self._last = False, None
            self._store.let_go(self, self._keys)

    def _check_lease(self) -> None:
        """A read that outlives its lease may have seen other bytes: checked before and after the copy."""
        now = self._store.clock()
        if now >= self.deadline:
            raise DeadlineExceeded(f"the lease on {len(self._keys)} objects ended {now - self.deadline:.3f} s ago")
