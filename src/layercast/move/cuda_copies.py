"""Copies as calls of many, by numba or in Python: runs are spread, cut at the seams of pinned memory, and fill calls.

So nobody writes lists of thousands of copies before the first is under way. Does not know programs, lanes or flights.
"""

from collections.abc import Callable

import numpy as np

from layercast.move.cuda_driver import ATTRIBUTES_BYTES, Calls
from layercast.move.cuda_program import Ints
from layercast.plan.pieces import COLUMNS

FIRST, MOST, CALL_BYTES = 8, 128, 8 << 20
"""Copies in a program's first call, copies and bytes in any, at most: a thread that launches kernels waits for no more
than one call. A device sees nothing of a call before all of it is written, so calls grow from FIRST on, by doubling."""
READ = 512
"""Pieces read at a time: a device waits until the first are."""
Work = tuple[Ints, Ints, Ints, Ints]
"""What a loop works with: pieces as read, int64 [6, READ]; addresses that no copy may cross, in order; a call of many
copies as written, int64 [3, MOST]; and how many the next one may hold, int64 [1]."""


def unbroken(cuts: Ints, at: int, nbytes: int) -> int:
    """Of so many bytes from `at` on, those before the next cut."""
    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if cuts[middle] <= at:
            low = middle + 1
        else:
            high = middle
    return min(nbytes, cuts[low] - at) if low < len(cuts) else nbytes


# What numba compiles sees local names alone, so the driver's calls are closed over.


def handing(
    calls: Calls, attributes: tuple[int, int], aside: Callable[[int], None], paced: Callable[..., int]
) -> Callable[..., int]:
    """(addresses of targets, sources and sizes, copies, bytes, stream, batched, pace) -> error code.

    Hands a call of many copies over, unless they went singly. Stands aside before it: what went before is counted then.
    """
    (first, nth), many, step = attributes, calls.copy_batch, ATTRIBUTES_BYTES

    def run(to: int, from_: int, sizes: int, count: int, nbytes: int, stream: int, batched: int, pace: int) -> int:
        if pace != 0:
            aside(pace)
        code = many(to, from_, sizes, count, first + step * (batched - 1), nth, 1, stream) if batched else 0
        if pace != 0 and code == 0:
            code = paced(pace, stream, nbytes)
        return code

    return run


def copying(
    calls: Calls, whole: Callable[..., int], hand_over: Callable[..., int], most_bytes: int = CALL_BYTES
) -> Callable[..., int]:
    """(work, pieces that are meant of those read, source shift, target shift, stream, batched, pace) -> error code."""
    one, most = calls.copy, MOST

    def run(work: Work, pieces: int, source: int, target: int, stream: int, batched: int, pace: int) -> int:
        (columns, cuts, call, room), code, filled, nbytes = work, 0, 0, 0
        to_at, from_at, sizes_at = call.ctypes.data, call.ctypes.data + 8 * most, call.ctypes.data + 16 * most
        for nth in range(pieces):
            for step in range(columns[3, nth]):
                from_ = columns[0, nth] + source + step * columns[4, nth]
                to, left = columns[1, nth] + target + step * columns[5, nth], columns[2, nth]
                while left > 0 and code == 0:
                    part = min(whole(cuts, to, whole(cuts, from_, left)), most_bytes - nbytes)
                    if batched:
                        call[0, filled], call[1, filled], call[2, filled] = to, from_, part
                    else:
                        code = one(to, from_, part, stream)
                    filled, nbytes = filled + 1, nbytes + part
                    if filled == room[0] or nbytes == most_bytes:
                        if code == 0:
                            code = hand_over(to_at, from_at, sizes_at, filled, nbytes, stream, batched, pace)
                        filled = nbytes = 0
                        room[0] = min(2 * room[0], most)
                    to, from_, left = to + part, from_ + part, left - part
        if filled > 0 and code == 0:
            code = hand_over(to_at, from_at, sizes_at, filled, nbytes, stream, batched, pace)
        return code

    return run


def plain_copying(calls: Calls, hand_over: Callable[..., int]) -> Callable[..., int]:
    """The same, by whole arrays where pieces are plain and cross no cut: a Python loop costs microseconds a piece."""
    by_piece = copying(calls, unbroken, hand_over)

    def run(work: Work, pieces: int, source: int, target: int, stream: int, batched: int, pace: int) -> int:
        columns, cuts, _, room = work
        from_, to, nbytes = columns[0, :pieces] + source, columns[1, :pieces] + target, columns[2, :pieces]
        broken = any(
            (np.searchsorted(cuts, at, "right") < np.searchsorted(cuts, at + nbytes)).any() for at in (from_, to)
        )
        longest = int(nbytes.max(initial=0))
        if not batched or broken or longest > CALL_BYTES or (columns[3, :pieces] != 1).any() or not nbytes.all():
            return by_piece(work, pieces, source, target, stream, batched, pace)
        first = code = 0
        while first < pieces and code == 0:
            count, skip = min(int(room[0]), CALL_BYTES // longest, pieces - first), 8 * first
            room[0] = min(2 * room[0], MOST)
            ends = to.ctypes.data + skip, from_.ctypes.data + skip, nbytes.ctypes.data + skip
            code = hand_over(*ends, count, int(nbytes[first : first + count].sum()), stream, batched, pace)
            first += count
        return code

    return run


def moving(calls: Calls, copies: Callable[..., int]) -> Callable[..., int]:
    """(work, table, pieces, address of two shifts, stream, batched, pace) -> error code.

    One batch of a table of pieces, READ of them at a time; copies: of `copying`.
    """
    fetch, width, some = calls.fetch, len(COLUMNS), READ

    def run(work: Work, table: int, pieces: int, shifts: int, stream: int, batched: int, pace: int) -> int:
        columns, shift, begun, code = work[0], np.empty(2, np.int64), 0, 0
        fetch(shift.ctypes.data, shifts, 16)
        while begun < pieces and code == 0:
            count = min(some, pieces - begun)
            for column in range(width):
                fetch(columns.ctypes.data + 8 * some * column, table + 8 * (pieces * column + begun), 8 * count)
            code = copies(work, count, shift[0], shift[1], stream, batched, pace)
            begun += count
        return code

    return run
