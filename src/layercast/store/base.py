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

from layercast.store.handles import ReadHandle, WriteHandle


class Store(ABC):
    """Objects under 32-byte keys. May be called from several threads."""

    @abstractmethod
    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is there now, in one batch."""

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
