"""What the rows of a program do, one by one, by numba or in Python: batches are moved, counted, and their errors noted.

Does not know which rows there are, nor who wrote them.
"""

from collections.abc import Callable

import numpy as np

from layercast.move.cuda_copies import Work
from layercast.move.cuda_driver import Calls
from layercast.move.cuda_pace import HANDED, LOW, PACE_WORDS, QUEUED
from layercast.move.cuda_program import LAUNCH_BYTES, Ints
from layercast.move.cuda_stage import ABOUT, HEAD, LEAD, SLOTS

BELL, PACE = 8, 24
"""A tally's words, from its count on: a bell's file and the address of what rings it, which it is behind each batch,
and a pace, in which stand the numbers of the last batches that the device has been handed and that are queued."""
TALLY_BYTES = PACE + 8 * PACE_WORDS
QUEUED_AT = PACE + 8 * QUEUED
Errors = tuple[int, int]
"""Where owners' error codes lie, and how many they are: who sees a batch counted must see that it was refused."""
Act = Callable[..., None]
CodeOf = Callable[[Errors, int], int]
Order = tuple[Callable[[int, int], int], Callable[[int, int], int]]
"""What records an event, and what has a stream go on behind it (see `cuda_behind`)."""


# What numba compiles sees local names alone, so the driver's calls are closed over.


def code_reading(calls: Calls) -> CodeOf:
    """(errors, owner) -> its first error code; 0 = none, and of everyone."""
    fetch = calls.fetch

    def run(errors: Errors, owner: int) -> int:
        code = np.zeros(1, np.int64)
        if owner >= 0:
            fetch(code.ctypes.data, errors[0] + 8 * owner, 8)
        return int(code[0])

    return run


def noting(calls: Calls, code_of: CodeOf) -> Callable[[Errors, int, int], None]:
    """(errors, owner, code): keep the first error of an owner, or of everyone."""
    fetch = calls.fetch

    def run(errors: Errors, owner: int, code: int) -> None:
        kept = np.full(1, code)
        for nth in range(errors[1]):
            if (nth == owner or owner < 0) and code_of(errors, nth) == 0:
                fetch(errors[0] + 8 * nth, kept.ctypes.data, 8)

    return run


def counting(calls: Calls) -> Callable[[int, int, int], int]:
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


def ending(counted: Callable[[int, int, int], int], note: Callable[..., None]) -> Callable[..., None]:
    """(code, stream, tally, number, errors, owner): what comes behind a batch, which is counted if there is a tally."""

    def run(code: int, stream: int, tally: int, number: int, errors: Errors, owner: int) -> None:
        if code != 0:
            note(errors, owner, code)
        if tally != 0:
            code = counted(stream, tally, number)
            if code != 0:
                note(errors, -1, code)

    return run


def batching(moved: Callable[..., int], code_of: CodeOf, ended: Act) -> Act:
    """(a row of copies, work, errors, first): batch by batch, each counted behind its copies."""

    def run(row: Ints, work: Work, errors: Errors, first: int) -> None:
        table, pieces, stream, batched, shifts = row[1], row[2], row[3], row[4], row[5]
        batches, tally, number, pace, owner = row[6], row[7], row[8], row[9], row[10]
        for nth in range(batches):
            whose, code = owner + nth if owner >= 0 else owner, 0
            if code_of(errors, whose) == 0:
                code = moved(work, table, pieces, shifts + 16 * nth, stream, batched, pace)
            ended(code, stream, tally, first + number + nth, errors, whose)

    return run


def launching(calls: Calls) -> Callable[..., int]:
    """(function, programs, threads, shared bytes, stream, address of its parameters) -> error code."""
    launch, offsets = calls.launch, np.arange(0, LAUNCH_BYTES, 8)

    def run(function: int, grid: int, threads: int, shared: int, stream: int, parameters: int) -> int:
        pointers = offsets + parameters
        return launch(function, grid, 1, 1, threads, 1, 1, shared, stream, pointers.ctypes.data, 0)

    return run


def relaying(calls: Calls, launched: Callable[..., int], order: Order, code_of: CodeOf, ended: Act) -> Act:
    """(a row of launches, errors, first): one by one, in turn on the streams of a relay, each counted behind itself."""
    fetch, step, (recorded, awaited) = calls.fetch, LAUNCH_BYTES, order

    def run(row: Ints, errors: Errors, first: int) -> None:
        function, grid, threads, shared, relay, parameters = row[1], row[2], row[3], row[4], row[5], row[6]
        launches, tally, number, owner = row[7], row[8], row[9], row[10]
        words = np.empty(5, np.int64)
        fetch(words.ctypes.data, relay, 40)
        behind = words[2]
        for nth in range(launches):
            whose, code, turn = owner + nth if owner >= 0 else owner, 0, (number + nth) % 2
            if code_of(errors, whose) == 0:
                code = launched(function, grid, threads, shared, words[turn], parameters + step * nth)
                if code == 0:
                    code = recorded(words[3 + turn], words[turn])
                if code == 0:
                    code = awaited(behind, words[3 + turn])
            ended(code, behind, tally, first + number + nth, errors, whose)

    return run


def staging(
    calls: Calls,
    moved: Callable[..., int],
    launched: Callable[..., int],
    order: Order,
    code_of: CodeOf,
    ended: Act,
) -> Act:
    """(a row that stages, work, errors, first): slots are filled, and emptied behind that.

    Up, a long copy fills a slot and a launch empties it; down, a launch fills it and a long copy empties it, and
    launches are LEAD slots ahead: where a device is busy one takes as long as a copy. All launches go by one stream,
    and what empties counts: every other stream with work of the cores' slows down a forward beside it.
    """
    fetch, step, (recorded, awaited) = calls.fetch, LAUNCH_BYTES, order
    slots, some, head, most = SLOTS, ABOUT, HEAD, LEAD

    def run(row: Ints, work: Work, errors: Errors, first: int) -> None:
        shifts, parameters, batches, slot, tally, number, pace = row[2], row[3], row[4], row[5], row[6], row[7], row[8]
        about, part, words = np.empty(some, np.int64), np.empty(2, np.int64), np.empty(head + 2 * slots, np.int64)
        fetch(about.ctypes.data, row[1], 8 * some)
        up, function, grid, threads, shared = about[0] != 0, about[1], about[2], about[3], about[4]
        batched, parts = about[6], about[7]
        fetch(words.ctypes.data, about[5], 8 * len(words))
        lead = 0 if up else most
        for turn in range(batches * parts + lead):
            for empties in range(2):
                nth = turn - lead * empties
                if nth < 0 or nth >= batches * parts:
                    continue
                whose = row[10] + nth // parts if row[10] >= 0 else row[10]
                copies, at = up != (empties == 1), head + 2 * ((slot + nth) % slots)
                stream = words[0] if copies else words[1]
                code = awaited(stream, words[at + 1 - empties])
                if code == 0 and code_of(errors, whose) == 0:
                    if copies:
                        fetch(part.ctypes.data, row[1] + 8 * some + 16 * (nth % parts), 16)
                        code = moved(work, part[0], part[1], shifts + 16 * nth, stream, batched, pace)
                    else:
                        code = launched(function, grid, threads, shared, stream, parameters + step * nth)
                refused = recorded(words[at + empties], stream)
                if code == 0:
                    code = refused
                last = empties == 1 and nth % parts == parts - 1
                ended(code, stream, tally if last else 0, first + number + nth // parts, errors, whose)

    return run
