"""Batches of objects under way: to write, buffered until the commit; to read, kept from one range to the next.

Objects are taken and given whole. Does not know where they lie: a store says how it takes them, and how it gets them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from layercast.errors import BadTransition, DeadlineExceeded, Refused

Buffer = bytes | bytearray | memoryview


class WriteHandle(AbstractContextManager["WriteHandle"]):
    """Room for a batch of objects, until `commit` or `revoke`. As a context it revokes what was not committed.

    admit: makes whole objects visible at once and ends their room; give_back: ends it where they do not come.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        admit: Callable[[Sequence[bytes], Sequence[bytearray]], None],
        give_back: Callable[[], None],
    ) -> None:
        self._keys = tuple(keys)
        self._sizes = tuple(sizes)
        self._objects = [bytearray(size) for size in sizes]
        self._written: list[list[tuple[int, int]]] = [[] for _ in sizes]
        self._admit = admit
        self._give_back = give_back
        self._open = True

    def write(self, index: int, offset: int, data: Buffer) -> None:
        """Put `data` at byte `offset` of object `index` of the batch. Ranges may come in any order, and again.

        Raises Refused for a range outside the object, BadTransition after the end.
        """
        self._check_open()
        view = memoryview(data).cast("B")
        end = offset + len(view)
        _check_range(self._sizes, index, offset, end)
        self._objects[index][offset:end] = view
        self._written[index].append((offset, end))

    def commit(self) -> None:
        """Make all objects visible at once. Raises Refused, having revoked, if a byte of one is not written."""
        self._check_open()
        counts = [covered(ranges) for ranges in self._written]
        torn = [index for index, size in enumerate(self._sizes) if counts[index] < size]
        if torn:
            self.revoke()
            first = torn[0]
            raise Refused(
                f"{len(torn)} of {len(self._keys)} objects are not whole ({self._keys[first].hex()}: {counts[first]} "
                f"of {self._sizes[first]} bytes written); the write is revoked"
            )
        self._open = False
        self._admit(self._keys, self._objects)

    def revoke(self) -> None:
        """Give the room back. Changes nothing after the end."""
        if self._open:
            self._open = False
            self._give_back()

    def _check_open(self) -> None:
        if not self._open:
            raise BadTransition("this write has been committed or revoked; open another one")

    def __exit__(self, *raised: object) -> None:
        self.revoke()


class ReadHandle(AbstractContextManager["ReadHandle"]):
    """A batch of objects that stay until `deadline` (of `clock`, in seconds) or `close`. As a context it closes.

    sizes: bytes of each object. fetch: gets one whole; the last one read is kept meanwhile. let_go: ends the lease.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        deadline: float,
        clock: Callable[[], float],
        fetch: Callable[[int], Buffer],
        let_go: Callable[[], None],
    ) -> None:
        self.sizes = sizes
        self._deadline = deadline
        self._clock = clock
        self._fetch = fetch
        self._let_go = let_go
        self._last: tuple[int, Buffer] | None = None
        self._open = True

    def read(self, index: int, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill `buffer` from byte `offset` of object `index`.

        Raises Refused for a range outside the object, DeadlineExceeded once the lease has ended (also if it ended
        during the read), Missing if the object is gone all the same, BadTransition after `close`, PeerLost. After an
        error the buffer's content is undefined.
        """
        if not self._open:
            raise BadTransition("this read has been closed; open another one")
        self._check_lease()
        view = memoryview(buffer).cast("B")
        end = offset + len(view)
        _check_range(self.sizes, index, offset, end)
        if self._last is None or self._last[0] != index:
            self._last = None
            self._last = index, self._fetch(index)
        view[:] = memoryview(self._last[1])[offset:end]
        self._check_lease()

    def close(self) -> None:
        """End the lease. A second call changes nothing."""
        if self._open:
            self._open, self._last = False, None
            self._let_go()

    def _check_lease(self) -> None:
        """A read that outlives its lease may have seen other bytes: checked before and after the copy."""
        late = self._clock() - self._deadline
        if late >= 0:
            raise DeadlineExceeded(f"the lease on {len(self.sizes)} objects ended {late:.3f} s ago")

    def __exit__(self, *raised: object) -> None:
        self.close()


def covered(ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes in the union of [start, end) ranges: one written twice counts once."""
    count = reached = 0
    for start, end in sorted(ranges):
        count += max(0, end - max(start, reached))
        reached = max(reached, end)
    return count


def _check_range(sizes: Sequence[int], index: int, offset: int, end: int) -> None:
    """Refuse bytes outside of object `index`."""
    if not 0 <= index < len(sizes) or not 0 <= offset <= end <= sizes[index]:
        raise Refused(f"bytes [{offset}, {end}) of object {index}: outside of a batch of {len(sizes)} objects {sizes}")
