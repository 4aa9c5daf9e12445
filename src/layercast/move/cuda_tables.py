"""The kernel's tables: what programs by the kernel read while they move, and the pool that they are taken from.

A program has tables of its own from when it is written until the device is done with them, so that any thread may
write one. Does not know streams, programs or flights.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from layercast.errors import DeadlineExceeded
from layercast.move.kernels.pieces_host import MULTIPLES, Ints, Scribe, even
from layercast.move.words import address_of, words_at
from layercast.plan.pieces import COLUMNS, Pieces

TABLES = 8
"""Programs under way at a time that use the kernel; one more waits for the first to end."""
SPARE = TABLES // 2
"""Of these for the thread that issues alone: it must never wait for a program that stands behind its own."""
TABLE_BYTES = 1 << 20
"""Room for the kernel's tables of one program: 43,000 pieces, half of which a lane keeps for what padding may add."""


class Parts(NamedTuple):
    """What pieces are, whatever layer they are of; staged, in parts that go through one slot of the buffer each.

    tables: int64 [parts, 4] as in `Scribe.launch`, what launches copy; staged, between the slot and the blocks, its
    addresses in the slot from 0 on. long: int64 [parts, 2], where the copies between host memory and the slot lie,
    int64 [6, copies] as in `Pieces`, and how many they are; none unless staged.
    """

    tables: Ints
    long: Ints


@dataclass(slots=True, eq=False)
class Tables:
    """The kernel's tables of one program, written in pinned memory, read in device memory."""

    host: int
    device: int
    free: int
    """The event behind the last that reads them."""
    number: int = 0
    """What the lane's tally comes to by then."""
    used: int = 0
    parts: dict[int, Parts] = field(default_factory=dict)
    """By the id of what batches share: a table is written once for all layers."""
    placed: dict[int, int] = field(default_factory=dict)
    """By the id of a series: where the parameters of its launches begin."""
    about: dict[int, int] = field(default_factory=dict)
    """By the id of the long copies of staged parts: where it stands how these go (see `cuda_stage.ABOUT`)."""
    held: list[Ints] = field(default_factory=list)
    """What parts name."""
    upload: tuple[tuple[int, int], int] = field(init=False)
    """The copy from the one memory to the other, once `complete`, as `Program.copies_of` takes it."""
    _copy: Ints = field(init=False)
    _room: Ints = field(init=False)

    def __post_init__(self) -> None:
        # A piece, and behind it what it is shifted by.
        self._copy = np.array([self.host, self.device, 0, 1, 0, 0, 0, 0], np.int64)
        at = address_of(self._copy)
        self.upload = (at, 1), at + 8 * len(COLUMNS)
        self._room = words_at(self.host, TABLE_BYTES // 4).view(np.int64)

    def clear(self) -> None:
        """Forget the program that had them."""
        self.used = 0
        self.parts.clear()
        self.placed.clear()
        self.about.clear()
        self.held.clear()

    def add(self, pieces: Pieces, scribe: Scribe) -> Parts:
        """Append a table of all copies that they are, not shifted."""
        at = self.used
        copies, chunks = scribe.spread(pieces.table, self._room, at // 8)
        assert copies >= 0, f"{MULTIPLES}, and there must be room for them"
        self.used += 24 * even(copies)
        table = np.array([[self.device + at, even(copies), copies, chunks]])
        return Parts(table if copies else table[:0], np.zeros((0, 2), np.int64))

    def cut(self, pieces: Pieces, up: bool, slot_bytes: int, scribe: Scribe) -> Parts:
        """Append tables of all copies that they are, not shifted, in parts that fit a slot each. up: from the host."""
        long, parts, end = scribe.cut(pieces.table, up, slot_bytes, self._room, self.used // 8, self.device)
        assert end >= 0, f"{MULTIPLES}, and there must be room for them"
        self.held.append(long)
        self.used = 8 * end
        return Parts(parts[:, 2:], parts[:, :2])

    def complete(self) -> None:
        """There is no more to come."""
        self._copy[2] = self.used


class Pool:
    """The tables of a lane that no program has, first those whose readers were issued first. For any thread.

    Who takes some has a list for what it has taken, and gives all that is there back at once. reached: whether the
    lane's tally has come to a number. sleep_until: an event has happened.
    """

    def __init__(
        self, tables: Sequence[Tables], reached: Callable[[int], bool], sleep_until: Callable[[int], None]
    ) -> None:
        self._free, self._all = deque(tables), tuple(tables)
        self._reached, self._sleep_until = reached, sleep_until
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._all)

    def take(self, taken: list[Tables]) -> bool:
        """Take some to write in at once, for a program that other programs may be issued before. Never blocks.

        False: there are none, or only such as are needed elsewhere.
        """
        with self._changed:
            if self._closed or len(self._free) <= SPARE or not self._reached(self._free[0].number):
                return False
            taken.append(tables := self._free.popleft())
        tables.clear()
        return True

    def take_next(self, taken: list[Tables]) -> None:
        """Take some for the program that is issued next; sleeps until the device is done with them.

        For the thread that issues, which always finds some. Raises DeviceFailed.
        """
        with self._changed:
            taken.append(tables := self._free.popleft())
        if not self._reached(tables.number):
            self._sleep_until(tables.free)
        tables.clear()

    def give_back(self, taken: list[Tables], number: int | None) -> None:
        """Take all that is in the list back. number: as in `Tables`; None = nothing has read them since.

        What read them has been issued, or never will be.
        """
        with self._changed:
            while taken:
                tables = taken.pop()
                tables.number = tables.number if number is None else number
                self._free.append(tables)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> tuple[Tables, ...]:
        """Nobody takes any more; what there is, once all have been given back. Raises DeadlineExceeded."""
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: len(self._free) == len(self._all), timeout_s):
                raise DeadlineExceeded(f"a copy that is being submitted has not come to its end in {timeout_s:g} s")
        return self._all
