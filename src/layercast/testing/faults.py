"""A clock that a test moves, and a store that fails where it is told to.

Does not know which store it wraps.
"""

from collections.abc import Sequence

import msgspec

from layercast.errors import PeerLost
from layercast.store.base import Buffer, ReadHandle, Store, WriteHandle


class FakeClock:
    """Seconds that pass only when told to. Call it for the time."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time now."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong; nothing by default. Reads and writes are counted from 0 over the store's life."""

    delay_s: float = 0.0
    """Seconds that every read and write takes."""
    fail_write_at: int | None = None
    fail_read_at: int | None = None
    """This write (read) raises PeerLost."""
    short_write_at: int | None = None
    """This write drops the second half of its bytes and says nothing."""
    evict_after_open: bool = False
    """Objects vanish between the opening of a read and its first byte, whatever the lease says."""


class FaultyStore(Store):
    """`inner`, with `faults`. Replace `faults` to change them; `clock` is the one that `inner` reads."""

    def __init__(self, inner: Store, clock: FakeClock, faults: Faults = Faults()) -> None:  # noqa: B008 - frozen
        self.inner = inner
        self.clock = clock
        self.faults = faults
        self.reads = 0
        self.writes = 0

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """As `inner`."""
        return self.inner.present(keys)

    def open_write(self, keys: Sequence[bytes], sizes: Sequence[int]) -> WriteHandle:
        """As `inner`, with faults in its writes."""
        return _FaultyWrite(self, self.inner.open_write(keys, sizes))

    def open_read(self, keys: Sequence[bytes], lease_s: float) -> ReadHandle:
        """As `inner`, with faults in its reads."""
        return _FaultyRead(self, self.inner.open_read(keys, lease_s), keys, lease_s)

    def evict(self, keys: Sequence[bytes]) -> list[bool]:
        """As `inner`."""
        return self.inner.evict(keys)

    def close(self) -> None:
        """As `inner`."""
        self.inner.close()


class _FaultyWrite(WriteHandle):
    def __init__(self, store: FaultyStore, inner: WriteHandle) -> None:
        self._store = store
        self._inner = inner

    def write(self, index: int, offset: int, data: Buffer) -> None:
        number, faults = self._store.writes, self._store.faults
        self._store.writes += 1
        self._store.clock.advance(faults.delay_s)
        if number == faults.fail_write_at:
            raise PeerLost(f"write {number} fails, as the test asked")
        if number == faults.short_write_at:
            view = memoryview(data).cast("B")
            data = view[: len(view) // 2]
        self._inner.write(index, offset, data)

    def commit(self) -> None:
        self._inner.commit()

    def revoke(self) -> None:
        self._inner.revoke()


class _FaultyRead(ReadHandle):
    def __init__(self, store: FaultyStore, inner: ReadHandle, keys: Sequence[bytes], lease_s: float) -> None:
        self._store = store
        self._inner = inner
        self._opened = keys, lease_s

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._inner.sizes

    def read(self, index: int, offset: int, buffer: bytearray | memoryview) -> None:
        number, faults = self._store.reads, self._store.faults
        self._store.reads += 1
        self._store.clock.advance(faults.delay_s)
        if number == faults.fail_read_at:
            raise PeerLost(f"read {number} fails, as the test asked")
        if faults.evict_after_open:
            self._inner.close()
            self._store.inner.evict(self._opened[0])
            self._inner = self._store.inner.open_read(*self._opened)  # raises what the inner store says of lost objects
        self._inner.read(index, offset, buffer)

    def close(self) -> None:
        self._inner.close()
