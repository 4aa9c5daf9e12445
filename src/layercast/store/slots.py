"""Which slots of one group are free, and which to hand out next: runs of neighbours where there are any.

Does not know keys, leases, addresses or what a slot holds.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

from layercast.errors import BadBlocks, Full

_first = attrgetter("start")


class SlotTable:
    """Allocator over slots [0, slots). Best fit over free extents, which merge with their neighbours when freed."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise BadBlocks(f"a table of {slots} slots: needs at least one")
        self.slots = slots
        self.free_count = slots
        self._starts = [0]
        self._lengths = {0: slots}
        self._by_length = [(slots, 0)]

    @property
    def used_count(self) -> int:
        """Slots handed out."""
        return self.slots - self.free_count

    @property
    def free_extents(self) -> list[tuple[int, int]]:
        """(first slot, number of slots) of every free extent, ascending."""
        return [(start, self._lengths[start]) for start in self._starts]

    def allocate(self, count: int, after: int | None = None) -> tuple[int, ...]:
        """`count` free slots, ascending, in as few runs as the free extents allow.

        Takes the extent that begins at `after` if it is long enough (so that a request's next chunk lies behind its
        last one), else the smallest that is, else the largest ones there are. Raises Full, and then takes nothing.
        """
        if not 0 <= count <= self.free_count:
            raise Full(f"{count} slots asked for, {self.free_count} of {self.slots} are free")
        taken: list[range] = []
        left = count
        while left:
            start, length = self._choose(left, after)
            used = min(length, left)
            self._cut(start, length, used)
            taken.append(range(start, start + used))
            left -= used
        self.free_count -= count
        if len(taken) == 1:
            return tuple(taken[0])
        taken.sort(key=_first)
        return tuple(chain.from_iterable(taken))

    def free(self, slots: Iterable[int]) -> None:
        """Take back slots, in any order. Raises BadBlocks for one out of range, repeated or free already."""
        ordered = sorted(slots)
        runs: list[list[int]] = []  # first slot, and the one behind the last
        if ordered and ordered == list(range(ordered[0], ordered[0] + len(ordered))):
            runs, ordered = [[ordered[0], ordered[-1] + 1]], []
        for slot in ordered:
            if runs and runs[-1][1] == slot:
                runs[-1][1] += 1
            else:
                runs.append([slot, slot + 1])
        behind = 0
        for start, end in runs:
            at = bisect_left(self._starts, end)  # the first extent that begins behind the run
            used_from = self._starts[at - 1] + self._lengths[self._starts[at - 1]] if at else 0
            if start < max(used_from, behind) or end > self.slots:
                raise BadBlocks(f"slots {start} to {end - 1} of {self.slots} are not in use, so they can't be freed")
            behind = end
        for start, end in runs:
            self._merge(start, end - start)
            self.free_count += end - start

    def _choose(self, wanted: int, after: int | None) -> tuple[int, int]:
        """The free extent to cut `wanted` slots from: (start, length)."""
        if after is not None and self._lengths.get(after, 0) >= wanted:
            return after, self._lengths[after]
        at = bisect_left(self._by_length, (wanted, 0))
        length, start = self._by_length[min(at, len(self._by_length) - 1)]
        return start, length

    def _merge(self, start: int, length: int) -> None:
        """Insert a free extent, joined with the ones that touch it."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + length:
            length += self._remove(start + length)
        if at > 0 and self._starts[at - 1] + self._lengths[self._starts[at - 1]] == start:
            start = self._starts[at - 1]
            length += self._remove(start)
        self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        insort(self._by_length, (length, start))
        self._lengths[start] = length

    def _cut(self, start: int, length: int, used: int) -> None:
        """Take the first `used` slots of a free extent."""
        if used == length:
            self._remove(start)
            return
        self._starts[bisect_left(self._starts, start)] += used
        del self._by_length[bisect_left(self._by_length, (length, start))]
        insort(self._by_length, (length - used, start + used))
        del self._lengths[start]
        self._lengths[start + used] = length - used

    def _remove(self, start: int) -> int:
        length = self._lengths.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        return length
