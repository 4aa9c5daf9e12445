"""Which bytes of an object have been written: what a commit counts, whatever a backend reports.

Does not know what the bytes are.
"""

from bisect import bisect_left, bisect_right


class Coverage:
    """The union of byte ranges of one object of `size` bytes; a range written twice counts once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.covered = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def whole(self) -> bool:
        """Whether every byte is covered."""
        return self.covered == self.size

    def add(self, start: int, end: int) -> None:
        """Cover [start, end), which the caller has checked to be inside the object."""
        if start == end:
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        gone = sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last], self._ends[first:last] = [start], [end]
        self.covered += end - start - gone
