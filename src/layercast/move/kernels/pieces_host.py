"""What the host writes for the kernel: its table of pieces, and what each launch is given.

Each in one compiled call (numba, where installed), else by numpy, to the same bit: numpy's calls take 10 us each where
a model's work has washed their code out of the caches, and nothing moves until a table is there. Does not know what
the pieces are.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from layercast.move.cuda_ways import rows_of
from layercast.plan.pieces import Pieces

Ints = npt.NDArray[np.int64]
WORD_BYTES = 16
"""What the kernel moves at a time: addresses, strides, lengths and shifts must be multiples."""
MULTIPLES = "addresses and lengths must be multiples of 16"
BLOCK = 2048
"""64-bit words one program copies in a turn: 16 KiB."""
PARAMETERS = 9
"""What a launch is given: seven numbers, and two pointers that Triton appends to memory that this kernel needs not."""


class Table(NamedTuple):
    """What the kernel copies: a table in device memory, its columns, the pieces in it, and turns the longest takes."""

    address: int
    columns: int
    pieces: int
    chunks: int


class Scribe(NamedTuple):
    """Who writes. pieces: int64 [6, pieces], as in `Pieces`. shifts: int64 [launches, 2], bytes to add on each side."""

    look: Callable[[Ints, Ints], tuple[int, int, bool]]
    """look(pieces, shifts): (bytes, copies, whether all that they are, and all shifts, are multiples of WORD_BYTES)."""
    spread: Callable[[Ints, Ints, int], tuple[int, int]]
    """spread(pieces, room, at): write from, to and 8-byte words of each copy, int64 [3, even(copies)], into room[at:].

    Copies of no bytes are left out. Returns (copies, turns that the longest takes), or (-1, 0) where not all are
    multiples of WORD_BYTES, or there is no room.
    """
    launch: Callable[..., int]
    """launch(given, shifts, first, step, *table): write rows first, first + step... of int64 [launches, PARAMETERS].

    Returns the address of `given`; 0 where a row of the table, or a shift, is no multiple of WORD_BYTES.
    """


def even(pieces: int) -> int:
    """Columns of a table of so many pieces: rows begin at multiples of 16 bytes."""
    return pieces + pieces % 2


def odd(array: Ints) -> bool:
    """Whether not all are multiples of WORD_BYTES; far quicker than a division each."""
    return bool(np.bitwise_or.reduce(array, axis=None) % WORD_BYTES)


def plain_scribe() -> Scribe:
    """The one that writes by numpy."""

    def look(pieces: Ints, shifts: Ints) -> tuple[int, int, bool]:
        bits = np.bitwise_or.reduce(pieces, axis=1).tolist()
        return *Pieces(pieces).size, not (odd(shifts) or any(bits[row] % WORD_BYTES for row in (0, 1, 2, 4, 5)))

    def spread(pieces: Ints, room: Ints, at: int) -> tuple[int, int]:
        rows = rows_of(Pieces(pieces)).table
        count, columns = rows.shape[1], even(rows.shape[1])
        if at + 3 * columns > len(room) or odd(rows):
            return -1, 0
        table = room[at : at + 3 * columns].reshape(3, columns)
        table[:, :count], table[:, count:] = rows, 0
        table[2] >>= 3
        return count, -(-int(table[2].max(initial=0)) // BLOCK)

    def launch(
        given: Ints, shifts: Ints, first: int, step: int, address: int, columns: int, pieces: int, chunks: int
    ) -> int:
        ours = given[first::step]
        ours[:, :5] = address, address + 8 * columns, address + 16 * columns, pieces, chunks
        ours[:, 5:7], ours[:, 7:] = shifts[first::step], 0
        return 0 if odd(ours[:, 5:7]) or (address | 8 * columns) % WORD_BYTES else given.ctypes.data

    return Scribe(look, spread, launch)


@cache
def compiled_scribe() -> Scribe:
    """The same compiled by numba, for a second when first called. Raises ImportError where numba is not.

    The calls keep the interpreter lock, as they end in microseconds.
    """
    from numba import njit, types

    number, read = types.int64, types.Array(types.int64, 2, "A", readonly=True)  # other arrays pass as such ones
    spread = njit(types.UniTuple(number, 2)(read, number[::1], number))(_spread)
    return Scribe(
        njit(types.Tuple((number, number, types.boolean))(read, read))(_look),
        spread,
        njit(number(number[:, ::1], read, *[number] * 6))(_launch),
    )


def best_scribe() -> Scribe:
    """The compiled one where numba is installed, else the plain one."""
    try:
        return compiled_scribe()
    except ImportError:
        return plain_scribe()


# What numba compiles.


def _look(pieces: Ints, shifts: Ints) -> tuple[int, int, bool]:
    nbytes = copies = bits = 0
    for nth in range(pieces.shape[1]):
        bits |= pieces[0, nth] | pieces[1, nth] | pieces[2, nth] | pieces[4, nth] | pieces[5, nth]
        nbytes, copies = nbytes + pieces[2, nth] * pieces[3, nth], copies + pieces[3, nth]
    for nth in range(shifts.shape[0]):
        bits |= shifts[nth, 0] | shifts[nth, 1]
    return nbytes, copies, bits % WORD_BYTES == 0


def _spread(pieces: Ints, room: Ints, at: int) -> tuple[int, int]:
    copies = bits = longest = 0
    for nth in range(pieces.shape[1]):
        if pieces[2, nth] > 0:
            copies += pieces[3, nth]
    columns = copies + copies % 2
    if at + 3 * columns > len(room):
        return -1, 0
    here = at
    for nth in range(pieces.shape[1]):
        from_, to, nbytes = pieces[0, nth], pieces[1, nth], pieces[2, nth]
        for _ in range(pieces[3, nth] if nbytes > 0 else 0):
            bits |= from_ | to | nbytes
            room[here], room[here + columns], room[here + 2 * columns] = from_, to, nbytes >> 3
            from_, to, here = from_ + pieces[4, nth], to + pieces[5, nth], here + 1
            longest = max(longest, nbytes >> 3)
    if columns > copies:
        room[here] = room[here + columns] = room[here + 2 * columns] = 0
    return (-1, 0) if bits % WORD_BYTES else (copies, (longest + BLOCK - 1) // BLOCK)


def _launch(
    given: Ints, shifts: Ints, first: int, step: int, address: int, columns: int, pieces: int, chunks: int
) -> int:
    bits = address | 8 * columns
    for nth in range(first, given.shape[0], step):
        given[nth, 0], given[nth, 1], given[nth, 2] = address, address + 8 * columns, address + 16 * columns
        given[nth, 3], given[nth, 4], given[nth, 5], given[nth, 6] = pieces, chunks, shifts[nth, 0], shifts[nth, 1]
        given[nth, 7] = given[nth, 8] = 0
        bits |= shifts[nth, 0] | shifts[nth, 1]
    return 0 if bits % WORD_BYTES else given.ctypes.data
