"""A program: the driver calls that move a whole step, as one table of integers.

Rows are run in order by `cuda_issue`, in one call that needs no interpreter lock. A program counts its batches from 0,
so it may be written before it is known where in a lane's queue it will stand. Does not know flights or layers.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from layercast.move.cuda_driver import Batched
from layercast.move.cuda_tables import Tables
from layercast.move.kernels.pieces_host import PARAMETERS
from layercast.move.words import address_of
from layercast.plan.pieces import Pieces, Series

Ints = npt.NDArray[np.int64]
WIDTH = 11
"""Columns of a row: what to do, up to nine arguments, and whose it is."""
LAUNCH_BYTES = 8 * PARAMETERS
"""What one launch's parameters take."""
EVERYBODYS = -1
"""The owner of a row whose failure is everyone's."""


class Op(IntEnum):
    """What a row does. Holds are skipped once their owner has failed, copies, launches and stages batch by batch."""

    COPIES = 0
    LAUNCHES = 1
    HOLD = 2
    RECORD = 3
    WAIT = 4
    WRITE = 5
    STAGES = 6


@dataclass(slots=True)
class Program:
    """Rows under construction. `owner` numbers whom an error belongs to; `held` keeps what the rows point to."""

    owner: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)
    held: dict[int, tuple[Ints, int]] = field(default_factory=dict)
    """By the id of an array that was handed in: what is kept, and its address."""
    _series: dict[int, tuple[Series, tuple[int, ...], int]] = field(default_factory=dict)
    """By their id: where their arrays and their shifts lie."""
    pace: int = 0
    """Address of the pace that copies keep (see `cuda_pace`); 0 = none."""
    tables: Tables | None = None
    """What its launches read; None where there are none. Its own until it has been issued, or never will be."""

    def table(self) -> Ints:
        """The rows as an int64 array [rows, WIDTH]."""
        return np.array(self.rows, np.int64).reshape(-1, WIDTH)

    def copies(
        self, series: Series, parts: range, stream: int, *, batched: Batched, tally: int = 0, number: int = 0
    ) -> None:
        """Neighbouring parts of a series, handed over as `batched` says.

        The owners are `owner` and those after it. tally: where the stream counts the first part as `number`, the next
        one as one more, and so on; 0 = nowhere. Arrays are named, not joined: numpy gives the interpreter lock up
        over arrays of more than 500 items, and taking it again beside a busy thread costs milliseconds each time.
        """
        if id(series) not in self._series:
            self._series[id(series)] = series, self.columns(series.pieces), self.hold(series.shifts)
        _, columns, shifts = self._series[id(series)]
        at, count = shifts + 16 * parts.start, len(parts)
        self._add(Op.COPIES, *columns, stream, batched, at, count, tally, number, self.pace)

    def columns(self, pieces: Pieces) -> tuple[int, ...]:
        """Where the table of pieces lies, and how many pieces there are."""
        return self.hold(pieces.table), len(pieces)

    def stages(
        self, about: int, shifts: Ints, parameters: int, batches: int, slot: int, tally: int, number: int
    ) -> None:
        """Batches by way of slots, owned and counted as those of `copies`, each in parts.

        about: the address of what `cuda_stage.ABOUT` says. shifts: int64 [parts of all batches, 2], of their long
        copies. parameters: of the launch of the first part, as of `launches`. slot: the number of that which it is
        staged in.
        """
        self._add(Op.STAGES, about, self.hold(shifts), parameters, batches, slot, tally, number, self.pace)

    def copies_of(
        self, columns: tuple[int, ...], shift: int, stream: int, *, batched: Batched, tally: int = 0, number: int = 0
    ) -> None:
        """One batch of what `columns` has said, shifted by the two numbers at the address `shift`; counted likewise."""
        self._add(Op.COPIES, *columns, stream, batched, shift, 1, tally, number, self.pace)

    def launches(
        self,
        kernel: tuple[int, int, int, int],
        relay: int,
        parameters: int,
        count: int,
        tally: int = 0,
        number: int = 0,
    ) -> None:
        """Launches, a batch each, owned and counted as those of `copies`.

        kernel: its function, programs, threads a program, and bytes of shared memory. relay: the address of one
        that outlives the program (see `cuda_relay`). parameters: where those of the first lie (PARAMETERS values of 64
        bits, or of 32 in their low half); LAUNCH_BYTES further those of the next.
        """
        self._add(Op.LAUNCHES, *kernel, relay, parameters, count, tally, number)

    def hold_until(self, stream: int, address: int, value: int = 1) -> None:
        """The stream goes on once the 32-bit word is `value` or more."""
        self._add(Op.HOLD, stream, address, value)

    def record(self, event: int, stream: int) -> None:
        """The event happens when what the stream has by now is done."""
        self._add(Op.RECORD, event, stream)

    def wait(self, stream: int, event: int) -> None:
        """The stream goes on after the event's last record."""
        self._add(Op.WAIT, stream, event)

    def write(self, stream: int, address: int, value: int = 1) -> None:
        """The stream sets a 32-bit word."""
        self._add(Op.WRITE, stream, address, value)

    def hold(self, array: Ints, address: int = 0) -> int:
        """Keep an array as long as the program; its address, which may be known already."""
        if address:
            self.held[id(array)] = array, address
        elif id(array) not in self.held:
            plain = np.ascontiguousarray(array, np.int64)
            self.held[id(array)] = array, address_of(plain)
            if plain is not array:
                self.held[id(plain)] = plain, 0
        return self.held[id(array)][1]

    def _add(self, op: Op, *arguments: int) -> None:
        self.rows.append((int(op), *arguments, *_NOTHING[len(arguments) :], self.owner))


_NOTHING = (0,) * (WIDTH - 2)
