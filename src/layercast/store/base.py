"""Bytes under a key, where no mover can address them: on disk, or in a store across the network.

One key names one block; its layers are byte ranges inside one object. Does not know groups, requests or engines.

Laws (see `testing.StoreLaws`):
- an object is invisible until its write is committed, whole: bytes covered are counted here, not reported by others;
- a write that has no room is refused before its first byte;
- the first commit of a key stays: keys name content, so a later one changes nothing;
- an open read keeps its objects until its lease ends; after that it yields no bytes, whatever became of them;
- presence has no side effects; a batch is one call.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

Buffer = bytes | bytearray | memoryview


class WriteHandle(ABC):
    """Room for a batch of objects, until `commit` or `revoke`. As a context it revokes what was not committed."""

    @abstractmethod
    def write(self, index: int, offset: int, data: Buffer) -> None:
        """Put `data` at byte `offset` of object `index` of the batch. Ranges may come in any order, and again.

        Raises Refused for a range outside the object, BadTransition after the end, PeerLost.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make all objects visible at once. Raises Refused, having revoked, if a byte of one is not written."""

    @abstractmethod
    def revoke(self) -> None:
        """Give the room back. Changes nothing after the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.revoke()


class ReadHandle(ABC):
    """A batch of objects that stay until the lease ends or `close`. As a context it closes."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each object of the batch."""

    @abstractmethod
    def read(self, index: int, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill `buffer` from byte `offset` of object `index`.

        Raises Refused for a range outside the object, DeadlineExceeded once the lease has ended (also if it ended
        during the read), Missing if the object is gone all the same, BadTransition after `close`, PeerLost. After an
        error the buffer's content is undefined.
        """

    @abstractmethod
    def close(self) -> None:
        """End the lease. A second call changes nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Store(ABC):
    """Objects under 32-byte keys. May be called from several threads."""

    @abstractmethod
    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is there now, in one batch."""

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many keys are there before the first that is not."""
        return [*self.present(keys), False].index(False)

    @abstractmethod
    def open_write(self, keys: Sequence[bytes], sizes: Sequence[int]) -> WriteHandle:
        """Room for one object of `sizes[i]` bytes a key, taken now, by evicting what nobody has open if need be.

        Raises Full, having changed nothing; Refused for repeated keys, unequal counts or a size below 1.
        """

    @abstractmethod
    def open_read(self, keys: Sequence[bytes], lease_s: float) -> ReadHandle:
        """Keep the objects of `keys` for `lease_s` seconds: all or none. Raises Missing, naming the absent keys."""

    @abstractmethod
    def evict(self, keys: Sequence[bytes]) -> list[bool]:
        """Drop objects that no open read holds; whether each key is absent now."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; every later call but `close` raises BadTransition."""
