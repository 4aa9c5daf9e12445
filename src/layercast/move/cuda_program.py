"""A program: the driver calls that move a whole step, as one table of integers, made before the first is issued.

Rows are run in order by `cuda_issue`, in one call that needs no interpreter lock. Does not know flights or layers.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from layercast.move.words import POSTED, stored

Ints = npt.NDArray[np.int64]
WIDTH = 9
"""Columns of a row: what to do, up to seven arguments, and whose it is."""
EVERYBODYS = -1
"""The owner of a row whose failure is everyone's."""
MOST_IN_BATCH = 1024
"""Pieces in one call of the driver, so that the first of many thousands is under way before the last is handed over."""


class Op(IntEnum):
    """What a row does. Those before RECORD are skipped once their owner has failed; the rest always run."""

    COPY = 0
    BATCH = 1
    LAUNCH = 2
    HOLD = 3
    RECORD = 4
    WAIT = 5
    WRITE = 6
    POST = 7


@dataclass(slots=True)
class Program:
    """Rows under construction. `owner` numbers whom an error belongs to; `held` keeps what the rows point to.

    cuts: ascending addresses that no copy may cross, since memory on both sides of them was pinned by itself.
    """

    cuts: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    owner: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)
    held: list[Ints] = field(default_factory=list)

    def table(self) -> Ints:
        """The rows as an int64 array [rows, WIDTH]."""
        table = np.zeros((len(self.rows), WIDTH), np.int64)
        for index, row in enumerate(self.rows):
            table[index, : len(row) - 1] = row[:-1]
            table[index, -1] = row[-1]
        return table

    def copies(
        self, target: Ints, source: Ints, length: Ints, stream: int, *, batched: bool, whole: bool = False
    ) -> None:
        """Plain copies, in calls of many pieces where the driver can (`batched`). whole: they cross no cut."""
        if not whole:
            _, target, source, length = cut_both(target, source, length, self.cuts)
        if not batched or len(length) == 1:
            for to, from_, nbytes in zip(target.tolist(), source.tolist(), length.tolist(), strict=True):
                self._add(Op.COPY, to, from_, nbytes, stream)
            return
        to, from_, nbytes = (self.hold(array) for array in (target, source, length))
        for first in range(0, len(length), MOST_IN_BATCH):
            count, skip = min(MOST_IN_BATCH, len(length) - first), 8 * first
            self._add(Op.BATCH, to + skip, from_ + skip, nbytes + skip, count, stream)

    def launch(self, function: int, grid: int, threads: int, shared: int, stream: int, values: Ints) -> None:
        """A kernel whose parameters are 64-bit values, or 32-bit ones in their low half."""
        address = self.hold(values)
        pointers = self.hold(address + 8 * np.arange(len(values), dtype=np.int64))
        self._add(Op.LAUNCH, function, grid, threads, shared, stream, pointers)

    def hold_until(self, stream: int, address: int) -> None:
        """The stream goes on once the 32-bit word is 1 or more."""
        self._add(Op.HOLD, stream, address, 1)

    def record(self, event: int, stream: int) -> None:
        """The event happens when what the stream has by now is done."""
        self._add(Op.RECORD, event, stream)

    def wait(self, stream: int, event: int) -> None:
        """The stream goes on after the event's last record."""
        self._add(Op.WAIT, stream, event)

    def write(self, stream: int, address: int) -> None:
        """The stream sets a 32-bit word to 1."""
        self._add(Op.WRITE, stream, address, 1)

    def post(self, address: int) -> None:
        """The issuing thread posts a word of this process."""
        self._add(Op.POST, address, stored(POSTED))

    def hold(self, array: Ints) -> int:
        """Keep an array as long as the program; its address."""
        array = np.ascontiguousarray(array, np.int64)
        self.held.append(array)
        return array.ctypes.data

    def _add(self, op: Op, *arguments: int) -> None:
        self.rows.append((op, *arguments, self.owner))


def cut_both(target: Ints, source: Ints, length: Ints, cuts: Ints) -> tuple[Ints | None, Ints, Ints, Ints]:
    """(index of the row each came from, or None where nothing was cut, and the same copies, which cross no cut)."""
    if not len(cuts) or not len(length):
        return None, target, source, length
    index, target, source, length = cut(target, source, length, cuts)
    again, source, target, length = cut(source, target, length, cuts)
    return (again if index is None else index if again is None else index[again]), target, source, length


def cut(address: Ints, other: Ints, length: Ints, cuts: Ints) -> tuple[Ints | None, Ints, Ints, Ints]:
    """The same copies, none of whose ranges from `address` on lies on both sides of a cut; index as of `cut_both`."""
    first, last = (
        np.searchsorted(cuts, address, side="right"),
        np.searchsorted(cuts, address + length - 1, side="right"),
    )
    parts = np.maximum(last - first, 0) + 1
    if int(parts.max(initial=1)) == 1:
        return None, address, other, length
    index = np.repeat(np.arange(len(parts)), parts)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
    nearest = first[index] + nth
    start = np.where(nth == 0, address[index], cuts[np.maximum(nearest - 1, 0)])
    end = np.where(nth == parts[index] - 1, (address + length)[index], cuts[np.minimum(nearest, len(cuts) - 1)])
    return index, start, other[index] + start - address[index], end - start
