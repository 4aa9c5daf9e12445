"""Runs programs: a compiled loop called once a program (numba, where installed), or the same loop in Python.

The compiled one releases the interpreter lock for the whole program, so a busy Python thread can't slow it; the plain
one is slower by the piece. Either spreads runs, cuts at the seams of pinned memory and fills the driver's calls, so
that nobody writes lists of thousands of copies before the first is under way. Neither knows what a row is for.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from layercast.move.cuda_behind import awaiting, recording
from layercast.move.cuda_driver import ATTRIBUTES_BYTES, Calls
from layercast.move.cuda_pace import HANDED, LOW, PACE_WORDS, QUEUED, pacing, standing_aside
from layercast.move.cuda_program import LAUNCH_BYTES, WIDTH, Ints, Op
from layercast.move.words import address_of
from layercast.plan.pieces import COLUMNS


class Issue(NamedTuple):
    """The loop, called with a program or left to wait for one."""

    run: Callable[[Ints, Ints, Ints, int], None]
    """run(table, cuts, errors, first): run every row; errors[owner] becomes that owner's first error code, at once.

    table: as `Program` makes it. cuts: ascending addresses that no copy may cross, since memory on both
    sides of them was pinned by itself. first: what the batches' numbers are counted from.
    """
    attend: Callable[[Ints, int], None]
    """attend(desk, nth): wait until that many items are put, and one more; run the program laid out, if it is the nth.

    desk: int64 [DESK_WORDS]: the bell's file, a word for what is read of it, PUT, STIRRED, and from LAID on: nth,
    first, and address and length of the table, the cuts and the errors.
    """
    lay: Callable[[Ints, Ints, Ints, Ints, int], None]
    """lay(desk, table, cuts, errors, first): lay a program out for the item that is put next."""


PUT, STIRRED, LAID, DESK_WORDS = 2, 3, 4, 12
"""Words of a desk: how many items have been put, behind it how many have been put or are on their way, and where a
program's numbers begin; and how many words there are."""
LOOKS = 1 << 17
"""Looks at PUT by who has been stirred before it sleeps again: a millisecond or so. A thread that sleeps is
woken in 0.1 ms, in which another has written most of a program."""
BELL, PACE = 8, 24
"""A tally's words, from its count on: a bell's file and the address of what rings it, which it is behind each batch,
and a pace, in which stand the numbers of the last batches that the device has been handed and that are queued."""
TALLY_BYTES = PACE + 8 * PACE_WORDS
QUEUED_AT = PACE + 8 * QUEUED
FIRST, MOST, CALL_BYTES = 8, 128, 8 << 20
"""Copies in a program's first call, copies and bytes in any, at most: a thread that launches kernels waits for no more
than one call. A device sees nothing of a call before all of it is written, so calls grow from FIRST on, by doubling."""
READ = 512
"""Pieces read at a time: a device waits until the first are."""
Errors = tuple[int, int]
"""Where owners' error codes lie, and how many they are: who sees a batch counted must see that it was refused."""
Act = Callable[..., None]
CodeOf = Callable[[Errors, int], int]
Order = tuple[Callable[[int, int], int], Callable[[int, int], int]]
"""What records an event, and what has a stream go on behind it (see `cuda_behind`)."""


def plain_issue(calls: Calls, attributes: tuple[int, int]) -> Issue:
    """The loop in Python, over ctypes."""
    code_of = _code_of(calls)
    note = _noting(calls, code_of)
    ended, behind = _ending(_counting(calls), note), (recording(calls), awaiting(calls))
    batches = _batches(calls, _plain_copies(calls, attributes), code_of, ended)
    loop = _loop(calls, batches, _launches(calls, behind, code_of, ended), behind, code_of, note)
    return Issue(_running(loop), _attending(calls, loop, 0), _lay)


@lru_cache(maxsize=2)
def compiled_issue(calls: Calls, attributes: tuple[int, int], call_bytes: int = CALL_BYTES) -> Issue:
    """The loop compiled by numba, which needs no compiler on the machine. Raises ImportError where numba is not.

    Compiles when first called with these: a second or two. call_bytes: in a call, at most.
    """
    from numba import njit

    aside, paced = njit(standing_aside(calls, QUEUED_AT)), njit(pacing(calls))
    hand_over = njit(_handing(calls, attributes, aside, paced))
    copies = njit(_copies(calls, njit(_unbroken), hand_over, call_bytes))
    code_of = njit(_code_of(calls))
    note = njit(_noting(calls, code_of))
    ended = njit(_ending(njit(_counting(calls)), note))
    behind = njit(recording(calls)), njit(awaiting(calls))
    batches, launches = njit(_batches(calls, copies, code_of, ended)), njit(_launches(calls, behind, code_of, ended))
    loop = njit(nogil=True)(_loop(calls, batches, launches, behind, code_of, note))
    attend, desk = njit(nogil=True)(_attending(calls, loop, LOOKS)), np.full(DESK_WORDS, -1, np.int64)
    table, nothing, lay = np.zeros((0, WIDTH), np.int64), np.zeros(0, np.int64), njit(_lay)
    attend(desk, 0)
    loop(table, nothing, (0, 0), 0)
    lay(desk, table, nothing, nothing, 0)
    return Issue(_running(loop), attend, lay)


def best_issue(calls: Calls, attributes: tuple[int, int]) -> Issue:
    """The compiled loop where numba is installed, else the plain one."""
    try:
        return compiled_issue(calls, attributes)
    except ImportError:
        return plain_issue(calls, attributes)


def _running(loop: Callable[..., None]) -> Callable[[Ints, Ints, Ints, int], None]:
    """See `Issue.run`."""
    return lambda table, cuts, errors, first: loop(table, cuts, (address_of(errors), len(errors)), first)


def _unbroken(cuts: Ints, at: int, nbytes: int) -> int:
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


def _code_of(calls: Calls) -> CodeOf:
    """(errors, owner) -> its first error code; 0 = none, and of everyone."""
    fetch = calls.fetch

    def run(errors: Errors, owner: int) -> int:
        code = np.zeros(1, np.int64)
        if owner >= 0:
            fetch(code.ctypes.data, errors[0] + 8 * owner, 8)
        return int(code[0])

    return run


def _noting(calls: Calls, code_of: CodeOf) -> Callable[[Errors, int, int], None]:
    """(errors, owner, code): keep the first error of an owner, or of everyone."""
    fetch = calls.fetch

    def run(errors: Errors, owner: int, code: int) -> None:
        kept = np.full(1, code)
        for nth in range(errors[1]):
            if (nth == owner or owner < 0) and code_of(errors, nth) == 0:
                fetch(errors[0] + 8 * nth, kept.ctypes.data, 8)

    return run


def _handing(calls: Calls, attributes: tuple[int, int], aside: Act, paced: Callable[..., int]) -> Callable[..., int]:
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


def _copies(
    calls: Calls, unbroken: Callable[..., int], hand_over: Callable[..., int], most_bytes: int = CALL_BYTES
) -> Callable[..., int]:
    """(columns, pieces, source shift, target shift, stream, batched, cuts, call, room, pace) -> error code.

    columns: int64 [6, READ], of which `pieces` are meant. call: int64 [3, MOST], where calls of many copies are
    written. room: int64 [1], how many the next call may hold.
    """
    one, most = calls.copy, MOST

    def run(
        columns: Ints,
        pieces: int,
        source: int,
        target: int,
        stream: int,
        batched: int,
        cuts: Ints,
        call: Ints,
        room: Ints,
        pace: int,
    ) -> int:
        code, filled, nbytes = 0, 0, 0
        to_at, from_at, sizes_at = call.ctypes.data, call.ctypes.data + 8 * most, call.ctypes.data + 16 * most
        for nth in range(pieces):
            for step in range(columns[3, nth]):
                from_ = columns[0, nth] + source + step * columns[4, nth]
                to, left = columns[1, nth] + target + step * columns[5, nth], columns[2, nth]
                while left > 0 and code == 0:
                    part = min(unbroken(cuts, to, unbroken(cuts, from_, left)), most_bytes - nbytes)
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


def _plain_copies(calls: Calls, attributes: tuple[int, int]) -> Callable[..., int]:
    """The same, by whole arrays where pieces are plain and cross no cut: a Python loop costs microseconds a piece."""
    hand_over = _handing(calls, attributes, standing_aside(calls, QUEUED_AT), pacing(calls))
    by_piece = _copies(calls, _unbroken, hand_over)

    def run(
        columns: Ints,
        pieces: int,
        source: int,
        target: int,
        stream: int,
        batched: int,
        cuts: Ints,
        call: Ints,
        room: Ints,
        pace: int,
    ) -> int:
        from_, to, nbytes = columns[0, :pieces] + source, columns[1, :pieces] + target, columns[2, :pieces]
        broken = any(
            (np.searchsorted(cuts, at, "right") < np.searchsorted(cuts, at + nbytes)).any() for at in (from_, to)
        )
        longest = int(nbytes.max(initial=0))
        if not batched or broken or longest > CALL_BYTES or (columns[3, :pieces] != 1).any() or not nbytes.all():
            return by_piece(columns, pieces, source, target, stream, batched, cuts, call, room, pace)
        first = code = 0
        while first < pieces and code == 0:
            count, skip = min(int(room[0]), CALL_BYTES // longest, pieces - first), 8 * first
            room[0] = min(2 * room[0], MOST)
            ends = to.ctypes.data + skip, from_.ctypes.data + skip, nbytes.ctypes.data + skip
            code = hand_over(*ends, count, int(nbytes[first : first + count].sum()), stream, batched, pace)
            first += count
        return code

    return run


def _counting(calls: Calls) -> Callable[[int, int, int], int]:
    """(stream, tally, number) -> error code: the device counts a batch, and whoever listens hears that it will."""
    write, fetch, ring, low, handed, bell = calls.write, calls.fetch, calls.ring, LOW, PACE + 8 * HANDED, BELL

    def run(stream: int, tally: int, number: int) -> int:
        code, told = write(stream, tally, number & low, 0), np.empty(2, np.int64)
        if code == 0:
            told[0] = number & low
            fetch(tally + handed, told.ctypes.data, 8)
            fetch(told.ctypes.data, tally + bell, 16)
            ring(told[0], told[1], 8)
        return code

    return run


def _ending(counted: Callable[[int, int, int], int], note: Callable[..., None]) -> Callable[..., None]:
    """(code, stream, tally, number, errors, owner): what comes behind a batch, which is counted if there is a tally."""

    def run(code: int, stream: int, tally: int, number: int, errors: Errors, owner: int) -> None:
        if code != 0:
            note(errors, owner, code)
        if tally != 0:
            code = counted(stream, tally, number)
            if code != 0:
                note(errors, -1, code)

    return run


def _batches(calls: Calls, copies: Callable[..., int], code_of: CodeOf, ended: Act) -> Act:
    """(a row of copies, columns, cuts, call, room, errors, first): batch by batch, each counted behind its copies."""
    fetch, width, some = calls.fetch, len(COLUMNS), READ

    def run(row: Ints, columns: Ints, cuts: Ints, call: Ints, room: Ints, errors: Errors, first: int) -> None:
        table, pieces, stream, batched, shifts = row[1], row[2], row[3], row[4], row[5]
        batches, tally, number, pace, owner = row[6], row[7], row[8], row[9], row[10]
        shift = np.empty(2, np.int64)
        for nth in range(batches):
            fetch(shift.ctypes.data, shifts + 16 * nth, 16)
            whose, code = owner + nth if owner >= 0 else owner, 0
            begun = pieces if code_of(errors, whose) != 0 else 0
            while begun < pieces and code == 0:
                count = min(some, pieces - begun)
                for column in range(width):
                    fetch(columns.ctypes.data + 8 * some * column, table + 8 * (pieces * column + begun), 8 * count)
                code = copies(columns, count, shift[0], shift[1], stream, batched, cuts, call, room, pace)
                begun += count
            ended(code, stream, tally, first + number + nth, errors, whose)

    return run


def _launches(calls: Calls, order: Order, code_of: CodeOf, ended: Act) -> Act:
    """(a row of launches, errors, first): one by one, in turn on the streams of a relay, each counted behind itself."""
    launch, fetch, step, offsets = calls.launch, calls.fetch, LAUNCH_BYTES, np.arange(0, LAUNCH_BYTES, 8)
    recorded, awaited = order

    def run(row: Ints, errors: Errors, first: int) -> None:
        function, grid, threads, shared, relay, parameters = row[1], row[2], row[3], row[4], row[5], row[6]
        launches, tally, number, owner = row[7], row[8], row[9], row[10]
        pointers, words = np.empty_like(offsets), np.empty(5, np.int64)
        fetch(words.ctypes.data, relay, 40)
        behind = words[2]
        for nth in range(launches):
            whose, code, turn = owner + nth if owner >= 0 else owner, 0, (number + nth) % 2
            if code_of(errors, whose) == 0:
                pointers[:] = offsets + (parameters + step * nth)
                code = launch(function, grid, 1, 1, threads, 1, 1, shared, words[turn], pointers.ctypes.data, 0)
                if code == 0 and words[turn] != behind:
                    code = recorded(words[3 + turn], words[turn])
                    if code == 0:
                        code = awaited(behind, words[3 + turn])
            ended(code, behind, tally, first + number + nth, errors, whose)

    return run


def _loop(calls: Calls, batches: Act, launches: Act, order: Order, code_of: CodeOf, note: Act) -> Act:
    """The loop over rows."""
    write, hold, (recorded, awaited) = calls.write, calls.hold, order
    is_copies, is_launches, is_hold = int(Op.COPIES), int(Op.LAUNCHES), int(Op.HOLD)
    is_record, is_wait = int(Op.RECORD), int(Op.WAIT)
    few, most, some, width, owned = FIRST, MOST, READ, len(COLUMNS), WIDTH - 1

    def run(table: Ints, cuts: Ints, errors: Errors, first: int) -> None:
        call, columns = np.empty((3, most), np.int64), np.empty((width, some), np.int64)
        room = np.full(1, few)
        for row in range(table.shape[0]):
            op, a, b, c, owner = table[row, 0], table[row, 1], table[row, 2], table[row, 3], table[row, owned]
            code = 0
            if op == is_copies:
                batches(table[row], columns, cuts, call, room, errors, first)
            elif op == is_launches:
                launches(table[row], errors, first)
            elif op == is_record:
                code = recorded(a, b)
            elif op == is_wait:
                code = awaited(a, b)
            elif op != is_hold:
                code = write(a, b, c, 0)
            elif code_of(errors, owner) == 0:
                code = hold(a, b, c, 0)
            if code != 0:
                note(errors, owner, code)

    return run


def _lay(desk: Ints, table: Ints, cuts: Ints, errors: Ints, first: int) -> None:
    """See `Issue.lay`."""
    desk[LAID + 1] = first
    desk[LAID + 2], desk[LAID + 3] = table.ctypes.data, len(table)
    desk[LAID + 4], desk[LAID + 5] = cuts.ctypes.data, len(cuts)
    desk[LAID + 6], desk[LAID + 7] = errors.ctypes.data, len(errors)
    desk[LAID] = desk[PUT]


def _attending(calls: Calls, loop: Callable[..., None], most_looks: int) -> Callable[[Ints, int], None]:
    """See `Issue.attend`."""
    fetch, ring, hear, width = calls.fetch, calls.ring, calls.hear, WIDTH
    read, put, laid = 1, PUT, LAID

    def attend(desk: Ints, nth: int) -> None:
        looks, at, seen = 0, desk.ctypes.data, np.zeros(2, np.int64)
        while desk[0] >= 0:
            fetch(seen.ctypes.data, at + 8 * put, 16)
            if seen[0] > nth:
                seen[0] = 1
                ring(desk[0], seen.ctypes.data, 8)  # what was put before is seen behind a call of the system's,
                hear(desk[0], at + 8 * read, 8)  # and nothing is left to hear
                break
            if seen[1] > nth and looks < most_looks:
                looks += 1
            else:
                hear(desk[0], at + 8 * read, 8)
                looks = 0
        if desk[laid] == nth:
            first, rows, seams = desk[laid + 1], desk[laid + 3], desk[laid + 5]
            table, cuts = np.empty((rows, width), np.int64), np.empty(seams, np.int64)
            fetch(table.ctypes.data, desk[laid + 2], 8 * rows * width)
            fetch(cuts.ctypes.data, desk[laid + 4], 8 * seams)
            loop(table, cuts, (desk[laid + 6], desk[laid + 7]), first)

    return attend
