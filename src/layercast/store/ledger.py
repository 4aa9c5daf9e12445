"""Which objects a store has room for, who holds them, and which go first: the part of a store that is not bytes.

Not thread-safe: a store calls it under its own lock. Does not know where objects lie.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from layercast.errors import Full


@dataclass(slots=True, eq=False)
class Entry:
    """One object. leases: the open reads that hold it, and their deadlines."""

    size: int
    leases: dict[Hashable, float] = field(default_factory=dict)

    def held(self, now: float) -> bool:
        """Whether an open read holds it."""
        return any(deadline > now for deadline in self.leases.values())


class Ledger:
    """At most `capacity` bytes of objects and of open writes. clock: seconds, never going back."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.capacity = capacity
        self.clock = clock
        self.used = 0
        """Bytes of objects and of open writes."""
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        """The next to go first."""

    def room_for(self, size: int) -> list[bytes]:
        """The keys to drop, least recently used first, for `size` more bytes; none is dropped here. Raises Full."""
        now, excess = self.clock(), self.used + size - self.capacity
        victims = []
        for key, entry in self.entries.items():
            if excess <= 0:
                break
            if not entry.held(now):
                victims.append(key)
                excess -= entry.size
        if excess > 0:
            raise Full(f"{size} bytes to write: {excess} too many for a store of {self.capacity}; write fewer")
        return victims

    def add(self, key: bytes, size: int) -> None:
        """Count an object, as just used."""
        self.used += size
        self.entries[key] = Entry(size)

    def drop(self, key: bytes) -> None:
        """Forget an object, if it is counted."""
        entry = self.entries.pop(key, None)
        self.used -= entry.size if entry is not None else 0

    def held(self, key: bytes) -> bool:
        """Whether an open read holds it."""
        return key in self.entries and self.entries[key].held(self.clock())

    def lease(self, reader: Hashable, keys: Iterable[bytes], deadline: float) -> None:
        """Hold objects for `reader`, and count them as just used."""
        for key in keys:
            self.entries[key].leases[reader] = deadline
            self.entries.move_to_end(key)

    def end(self, reader: Hashable, keys: Iterable[bytes]) -> None:
        """End what `reader` holds of `keys`."""
        for key in keys:
            if key in self.entries:
                self.entries[key].leases.pop(reader, None)
