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

from layercast.move.cuda_ways import rows_of, stretches
from layercast.plan.pieces import Pieces

Ints = npt.NDArray[np.int64]
Places = tuple[int, int, int]
WORD_BYTES = 16
"""What the kernel moves at a time: addresses, strides, lengths and shifts must be multiples."""
MULTIPLES = "addresses and lengths must be multiples of 16"
BLOCK = 2048
"""64-bit words one program copies in a turn: 16 KiB."""
PARAMETERS = 9
"""What a launch is given: seven numbers, and two pointers that Triton appends to memory that this kernel needs not."""


class Scribe(NamedTuple):
    """Who writes. pieces: int64 [6, pieces], as in `Pieces`. shifts: int64 [launches, 2], bytes to add on each side."""

    look: Callable[[Ints, Ints], tuple[int, int, int, bool]]
    """look(pieces, shifts): (bytes, copies, bytes of the longest, whether all are multiples of WORD_BYTES).

    All: addresses, lengths and strides, even of what is copied no times, and shifts.
    """
    spread: Callable[[Ints, Ints, int], tuple[int, int]]
    """spread(pieces, room, at): write from, to and 8-byte words of each copy, int64 [3, even(copies)], into room[at:].

    Copies of no bytes are left out. Returns (copies, turns that the longest takes), or (-1, 0) where not all are
    multiples of WORD_BYTES, or there is no room.
    """
    runs: Callable[[Ints, bool], int]
    """runs(pieces, up): the unbroken stretches of host memory that they make, on their source if up, else target."""
    cut: Callable[[Ints, bool, int, Ints, int, int], tuple[Ints, Ints, int]]
    """cut(pieces, up, slot_bytes, room, at, device): cut them in parts that fit a slot each, in host memory's order.

    Returns (long, parts, where the room goes on). Row (address, longs, table, columns, copies, turns) of int64
    [parts, 6]: in `long` lies at the address int64 [6, longs], the copies between host memory and the slot, as in
    `Pieces`; at `table`, where the room is read from address `device` on, the kernel's table of those between the slot
    and the blocks, as by `spread`. Addresses in a slot begin at 0. No part where there are no bytes; -1 for the room
    where `spread` would say so, or one copy fits no slot.
    """
    launch: Callable[[Ints, Ints, Ints], int]
    """launch(given, tables, shifts): write int64 [launches, PARAMETERS], the tables in turn.

    tables: int64 [count, 4], its address on the device, columns, pieces in them, and turns that the longest takes.
    Returns the address of `given`; 0 where a row of a table, or a shift, is no multiple of WORD_BYTES.
    """
    by_slots: Callable[[Ints, Ints, bool, int, Places], None]
    """by_slots(halves, shifts, up, first, slots): write int64 [2, turns, 2], shifts of long copies, and of launches.

    shifts: int64 [batches, 2], each for the parts of a batch, as many in all, which take a turn each. slots: (address
    of the first, bytes of each, how many there are), taken in turn from number `first` on.
    """


def even(pieces: int) -> int:
    """Columns of a table of so many pieces: rows begin at multiples of 16 bytes."""
    return pieces + pieces % 2


def odd(array: Ints) -> bool:
    """Whether not all are multiples of WORD_BYTES; far quicker than a division each."""
    return bool(np.bitwise_or.reduce(array, axis=None) % WORD_BYTES)


def plain_scribe() -> Scribe:
    """The one that writes by numpy."""

    def look(pieces: Ints, shifts: Ints) -> tuple[int, int, int, bool]:
        bits = np.bitwise_or.reduce(pieces, axis=1).tolist()
        fine = not (odd(shifts) or any(bits[row] % WORD_BYTES for row in (0, 1, 2, 4, 5)))
        return *Pieces(pieces).size, int(pieces[2].max(initial=0)), fine

    def spread(pieces: Ints, room: Ints, at: int) -> tuple[int, int]:
        rows = rows_of(Pieces(pieces)).table
        count, columns = rows.shape[1], even(rows.shape[1])
        if at + 3 * columns > len(room) or odd(rows):
            return -1, 0
        table = room[at : at + 3 * columns].reshape(3, columns)
        table[:, :count], table[:, count:] = rows, 0
        table[2] >>= 3
        return count, -(-int(table[2].max(initial=0)) // BLOCK)

    def runs(pieces: Ints, up: bool) -> int:
        rows = rows_of(Pieces(pieces))
        stretch = stretches(rows.source if up else rows.target, rows.length)[1]
        return int(stretch[-1]) + 1 if len(rows) else 0

    def cut(pieces: Ints, up: bool, slot_bytes: int, room: Ints, at: int, device: int) -> tuple[Ints, Ints, int]:
        rows, first, used, parts = rows_of(Pieces(pieces)), 0, 0, list[tuple[int, ...]]()
        order, stretch = stretches(rows.source if up else rows.target, rows.length)
        rows = rows.take(order)
        ends, long = np.cumsum(rows.length), np.empty(6 * len(rows), np.int64)
        nothing = long[:0], np.zeros((0, 6), np.int64), -1
        if odd(rows.table) or (rows.length > slot_bytes).any():
            return nothing
        while first < len(rows):
            skipped = int(ends[first] - rows.length[first])
            last = int(np.searchsorted(ends, skipped + slot_bytes, side="right"))
            part, in_slot = rows.take(slice(first, last)), (ends - rows.length)[first:last] - skipped
            heads = np.flatnonzero(np.diff(stretch[first:last], prepend=-1))
            from_, to = (part.source, in_slot) if up else (in_slot, part.target)
            moves = Pieces.plain(from_[heads], to[heads], np.add.reduceat(part.length, heads)).table
            long[used : used + moves.size] = moves.reshape(-1)
            from_, to = (in_slot, part.target) if up else (part.source, in_slot)
            copies, turns = spread(Pieces.plain(from_, to, part.length).table, room, at)
            if copies < 0:
                return nothing
            parts.append((long.ctypes.data + 8 * used, len(heads), device + 8 * at, even(copies), copies, turns))
            at, used, first = at + 3 * even(copies), used + moves.size, last
        return long[:used], np.array(parts, np.int64).reshape(-1, 6), at

    def launch(given: Ints, tables: Ints, shifts: Ints) -> int:
        address, columns, *sizes = tables[np.arange(len(given)) % len(tables)].T
        given[:, :5] = np.stack([address, address + 8 * columns, address + 16 * columns, *sizes], axis=1)
        given[:, 5:7], given[:, 7:] = shifts, 0
        return 0 if odd(shifts) or odd(address | 8 * columns) else given.ctypes.data

    def by_slots(halves: Ints, shifts: Ints, up: bool, first: int, slots: Places) -> None:
        (base, nbytes, count), turns = slots, halves.shape[1]
        halves[:] = np.repeat(shifts, turns // len(shifts), axis=0)
        places = base + (first + np.arange(turns)) % count * nbytes
        halves[0, :, 1 if up else 0] = halves[1, :, 0 if up else 1] = places

    return Scribe(look, spread, runs, cut, launch, by_slots)


@cache
def compiled_scribe() -> Scribe:
    """The same compiled by numba, for three seconds when first called. Raises ImportError where numba is not.

    The calls keep the interpreter lock, as they end in microseconds.
    """
    from numba import njit, types

    number, read = types.int64, types.Array(types.int64, 2, "A", readonly=True)  # other arrays pass as such ones
    yes, many, line = types.boolean, number[:, ::1], number[::1]
    sort = njit(line(many, line, line, number))(_sorted)
    laid, count, fill = (
        njit(types.Tuple((many, line))(read, yes))(_laying(sort)),
        njit(number(many, line))(_runs),
        njit(types.UniTuple(number, 3)(many, line, yes, number, line, number, number, line, many))(_cut),
    )

    def cut(pieces: Ints, up: bool, slot_bytes: int, room: Ints, at: int, device: int) -> tuple[Ints, Ints, int]:
        rows, order = laid(pieces, up)
        long, parts = np.empty(6 * len(order), np.int64), np.empty((len(order), 6), np.int64)
        found, used, end = fill(rows, order, up, slot_bytes, room, at, device, long, parts)
        return long[:used], parts[:found], end

    return Scribe(
        njit(types.Tuple((number, number, number, yes))(read, read))(_look),
        njit(types.UniTuple(number, 2)(read, line, number))(_spread),
        lambda pieces, up: count(*laid(pieces, up)),
        cut,
        njit(number(many, read, read))(_launch),
        njit(types.void(number[:, :, ::1], read, yes, number, types.UniTuple(number, 3)))(_by_slots),
    )


def best_scribe() -> Scribe:
    """The compiled one where numba is installed, else the plain one."""
    try:
        return compiled_scribe()
    except ImportError:
        return plain_scribe()


# What numba compiles.


def _look(pieces: Ints, shifts: Ints) -> tuple[int, int, int, bool]:
    nbytes = copies = bits = longest = 0
    for nth in range(pieces.shape[1]):
        bits |= pieces[0, nth] | pieces[1, nth] | pieces[2, nth] | pieces[4, nth] | pieces[5, nth]
        nbytes, copies = nbytes + pieces[2, nth] * pieces[3, nth], copies + pieces[3, nth]
        longest = max(longest, pieces[2, nth])
    for nth in range(shifts.shape[0]):
        bits |= shifts[nth, 0] | shifts[nth, 1]
    return nbytes, copies, longest, bits % WORD_BYTES == 0


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


def _laying(in_order: Callable[[Ints, Ints, Ints, np.int64], Ints]) -> Callable[[Ints, bool], tuple[Ints, Ints]]:
    """(pieces, up) -> (host's address, the other one, bytes of each copy of any: int64 [3, copies]; their order)."""

    def laid(pieces: Ints, up: bool) -> tuple[Ints, Ints]:
        copies, nth, ordered, least = 0, 0, True, np.int64(0)
        for piece in range(pieces.shape[1]):
            if pieces[2, piece] > 0:
                copies += pieces[3, piece]
        rows, order, other = np.empty((3, copies), np.int64), np.empty(copies, np.int64), np.empty(copies, np.int64)
        for piece in range(pieces.shape[1]):
            for turn in range(pieces[3, piece] if pieces[2, piece] > 0 else 0):
                from_, to = pieces[0, piece] + turn * pieces[4, piece], pieces[1, piece] + turn * pieces[5, piece]
                host, end = (from_, to) if up else (to, from_)
                rows[0, nth], rows[1, nth], rows[2, nth], order[nth] = host, end, pieces[2, piece], nth
                ordered = ordered and (nth == 0 or rows[0, nth - 1] <= host)
                least, nth = host if nth == 0 else min(least, host), nth + 1
        return rows, order if ordered else in_order(rows, order, other, least)

    return laid


def _sorted(rows: Ints, order: Ints, other: Ints, least: np.int64) -> Ints:
    """The order by host's address, in one of two arrays: by digits of 11 bits, thousands in a fifth of numpy's time.

    Addresses span less than 2**63.
    """
    bits, shift, places = np.int64(0), 0, np.empty(2048, np.int64)
    for nth in order:
        bits |= rows[0, nth] - least
    while not (bits >> shift) & 1:
        shift += 1
    while bits >> shift:
        places[:] = 0
        for nth in order:
            places[((rows[0, nth] - least) >> shift) & 2047] += 1
        behind = np.int64(0)
        for digit in range(2048):
            places[digit], behind = behind, behind + places[digit]
        for nth in order:
            digit = ((rows[0, nth] - least) >> shift) & 2047
            other[places[digit]], places[digit] = nth, places[digit] + 1
        order, other, shift = other, order, shift + 11
    return order


def _runs(rows: Ints, order: Ints) -> int:
    runs, end = 0, np.int64(-1)
    for nth in order:
        runs, end = runs + (rows[0, nth] != end), rows[0, nth] + rows[2, nth]
    return runs


def _cut(
    rows: Ints, order: Ints, up: bool, slot_bytes: int, room: Ints, at: int, device: int, long: Ints, parts: Ints
) -> tuple[int, int, int]:
    """(parts, numbers in `long`, where the room goes on): see `Scribe.cut`."""
    copies, first, used, found, bits = len(order), 0, 0, 0, np.int64(0)
    while first < copies:
        last, filled, longs, end = first, 0, 0, np.int64(-1)
        while last < copies and filled + rows[2, order[last]] <= slot_bytes:
            nth = order[last]
            longs, filled, last = longs + (rows[0, nth] != end), filled + rows[2, nth], last + 1
            end = rows[0, nth] + rows[2, nth]
        columns = last - first + (last - first) % 2
        if last == first or at + 3 * columns > len(room):
            return 0, 0, -1
        here, longest, filled, end, nth_long = at, np.int64(0), 0, np.int64(-1), used - 1
        for place in range(first, last):
            host, other, nbytes = rows[0, order[place]], rows[1, order[place]], rows[2, order[place]]
            if host != end:
                nth_long += 1
                long[nth_long], long[nth_long + longs] = host if up else filled, filled if up else host
                long[nth_long + 2 * longs], long[nth_long + 3 * longs] = 0, 1
                long[nth_long + 4 * longs] = long[nth_long + 5 * longs] = 0
            long[nth_long + 2 * longs] += nbytes
            room[here], room[here + columns] = filled if up else other, other if up else filled
            room[here + 2 * columns] = nbytes >> 3
            bits |= host | other | nbytes
            longest, filled, end, here = max(longest, nbytes >> 3), filled + nbytes, host + nbytes, here + 1
        if columns > last - first:
            room[here] = room[here + columns] = room[here + 2 * columns] = 0
        parts[found, 0], parts[found, 1], parts[found, 2] = long.ctypes.data + 8 * used, longs, device + 8 * at
        parts[found, 3], parts[found, 4], parts[found, 5] = columns, last - first, (longest + BLOCK - 1) // BLOCK
        found, used, at, first = found + 1, used + 6 * longs, at + 3 * columns, last
    return (0, 0, -1) if bits % WORD_BYTES else (found, used, at)


def _launch(given: Ints, tables: Ints, shifts: Ints) -> int:
    bits = np.int64(0)
    for nth in range(given.shape[0]):
        table = nth % tables.shape[0]
        address, columns = tables[table, 0], tables[table, 1]
        given[nth, 0], given[nth, 1], given[nth, 2] = address, address + 8 * columns, address + 16 * columns
        given[nth, 3], given[nth, 4] = tables[table, 2], tables[table, 3]
        given[nth, 5], given[nth, 6], given[nth, 7], given[nth, 8] = shifts[nth, 0], shifts[nth, 1], 0, 0
        bits |= address | 8 * columns | shifts[nth, 0] | shifts[nth, 1]
    return 0 if bits % WORD_BYTES else given.ctypes.data


def _by_slots(halves: Ints, shifts: Ints, up: bool, first: int, slots: Places) -> None:
    each = halves.shape[1] // shifts.shape[0]
    for turn in range(halves.shape[1]):
        place = slots[0] + (first + turn) % slots[2] * slots[1]
        source, target = shifts[turn // each, 0], shifts[turn // each, 1]
        halves[0, turn, 0], halves[0, turn, 1] = (source, place) if up else (place, target)
        halves[1, turn, 0], halves[1, turn, 1] = (place, target) if up else (source, place)
