"""Runs programs: a compiled loop called once a program (numba, where installed), or the same loop in Python.

The compiled one releases the interpreter lock for the whole program, so a busy Python thread can't slow it; the plain
one is slower by the piece. Neither knows what a row is for.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from layercast.move.cuda_behind import awaiting, recording
from layercast.move.cuda_copies import (
    CALL_BYTES,
    FIRST,
    MOST,
    READ,
    copying,
    handing,
    moving,
    plain_copying,
    unbroken,
)
from layercast.move.cuda_driver import Calls
from layercast.move.cuda_pace import pacing, standing_aside
from layercast.move.cuda_program import WIDTH, Ints, Op
from layercast.move.cuda_rows import (
    QUEUED_AT,
    Act,
    CodeOf,
    Errors,
    Order,
    batching,
    code_reading,
    counting,
    ending,
    launching,
    noting,
    relaying,
    staging,
)
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


def plain_issue(calls: Calls, attributes: tuple[int, int]) -> Issue:
    """The loop in Python, over ctypes."""
    hand_over = handing(calls, attributes, standing_aside(calls, QUEUED_AT), pacing(calls))
    loop = _acting(calls, plain_copying(calls, hand_over), _as_it_is)
    return Issue(_running(loop), _attending(calls, loop, 0), _lay)


@lru_cache(maxsize=2)
def compiled_issue(calls: Calls, attributes: tuple[int, int], call_bytes: int = CALL_BYTES) -> Issue:
    """The loop compiled by numba, which needs no compiler on the machine. Raises ImportError where numba is not.

    Compiles when first called with these: a second or two. call_bytes: in a call, at most.
    """
    from numba import njit

    hand_over = njit(handing(calls, attributes, njit(standing_aside(calls, QUEUED_AT)), njit(pacing(calls))))
    loop = njit(nogil=True)(_acting(calls, njit(copying(calls, njit(unbroken), hand_over, call_bytes)), njit))
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


def _as_it_is(act: Callable[..., Any]) -> Callable[..., Any]:
    """Where nothing is compiled."""
    return act


# What numba compiles sees local names alone, so the driver's calls are closed over.


def _acting(calls: Calls, copies: Callable[..., int], made: Callable[..., Any]) -> Act:
    """The loop over rows, of which each does what `cuda_rows` says. made: of a function of it what others may call."""
    code_of = made(code_reading(calls))
    note = made(noting(calls, code_of))
    ended, order = made(ending(made(counting(calls)), note)), (made(recording(calls)), made(awaiting(calls)))
    moved, launched = made(moving(calls, copies)), made(launching(calls))
    batches, launches = batching(moved, code_of, ended), relaying(calls, launched, order, code_of, ended)
    stages = staging(calls, moved, launched, order, code_of, ended)
    return _loop(calls, made(batches), made(launches), made(stages), order, code_of, note)


def _loop(calls: Calls, batches: Act, launches: Act, stages: Act, order: Order, code_of: CodeOf, note: Act) -> Act:
    """The loop over rows."""
    write, hold, (recorded, awaited) = calls.write, calls.hold, order
    is_copies, is_launches, is_stages, is_hold = int(Op.COPIES), int(Op.LAUNCHES), int(Op.STAGES), int(Op.HOLD)
    is_record, is_wait = int(Op.RECORD), int(Op.WAIT)
    few, most, some, width, owned = FIRST, MOST, READ, len(COLUMNS), WIDTH - 1

    def run(table: Ints, cuts: Ints, errors: Errors, first: int) -> None:
        work = np.empty((width, some), np.int64), cuts, np.empty((3, most), np.int64), np.full(1, few)
        for row in range(table.shape[0]):
            op, a, b, c, owner = table[row, 0], table[row, 1], table[row, 2], table[row, 3], table[row, owned]
            code = 0
            if op == is_copies:
                batches(table[row], work, errors, first)
            elif op == is_launches:
                launches(table[row], errors, first)
            elif op == is_stages:
                stages(table[row], work, errors, first)
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
