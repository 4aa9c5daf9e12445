"""Runs programs: a compiled loop called once a program (numba, where installed), or the same loop in Python.

The compiled one releases the interpreter lock for the whole program, so a busy Python thread can't slow it; the plain
one takes the lock again after every call. Neither knows what a row is for.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from layercast.move.cuda_driver import Calls
from layercast.move.cuda_program import WIDTH, Ints, Op
from layercast.move.words import EVERYBODY, FUTEX, WAKE_OP

Issue = Callable[[Ints, npt.NDArray[np.int64]], None]
"""issue(table, errors): run every row; errors[owner] becomes the first error code of that owner."""


def plain_issue(calls: Calls, attributes: tuple[int, int]) -> Issue:
    """The loop in Python, over ctypes."""

    def run(table: Ints, errors: npt.NDArray[np.int64]) -> None:
        for op, a, b, c, d, e, f, _, owner in table.tolist():
            if op < Op.RECORD and owner >= 0 and errors[owner]:
                continue
            code = 0
            if op == Op.BATCH:
                code = calls.copy_batch(a, b, c, d, *attributes, 1, e)
            elif op == Op.COPY:
                code = calls.copy(a, b, c, d)
            elif op == Op.LAUNCH:
                code = calls.launch(a, b, 1, 1, c, 1, 1, d, e, f, 0)
            elif op == Op.HOLD:
                code = calls.hold(a, b, c, 0)
            elif op == Op.RECORD:
                code = calls.record(a, b)
            elif op == Op.WAIT:
                code = calls.wait(a, b, 0)
            elif op == Op.WRITE:
                code = calls.write(a, b, c, 0)
            else:
                calls.syscall(FUTEX, a, WAKE_OP, EVERYBODY, 0, a, b)
            if code:
                _note(errors, owner, code)

    return run


def compiled_issue(calls: Calls, attributes: tuple[int, int]) -> Issue:
    """The loop compiled by numba, which needs no compiler on the machine. Raises ImportError where numba is not.

    Compiles when called: a second or two.
    """
    from numba import njit

    loop = njit(nogil=True)(_loop(calls, attributes, njit(_note)))
    loop(np.zeros((0, WIDTH), np.int64), np.zeros(1, np.int64))
    return loop  # type: ignore[no-any-return]


def best_issue(calls: Calls, attributes: tuple[int, int]) -> Issue:
    """The compiled loop where numba is installed, else the plain one."""
    try:
        return compiled_issue(calls, attributes)
    except ImportError:
        return plain_issue(calls, attributes)


def _note(errors: npt.NDArray[np.int64], owner: int, code: int) -> None:
    """Keep the first error of an owner, or of everyone."""
    for nth in range(len(errors)):
        if (nth == owner or owner < 0) and errors[nth] == 0:
            errors[nth] = code


def _loop(calls: Calls, attributes: tuple[int, int], note: Callable[..., None]) -> Issue:
    """The loop over local names alone, which is all that numba can see."""
    copy, copy_batch, launch = calls.copy, calls.copy_batch, calls.launch
    record, wait, write, hold, syscall = calls.record, calls.wait, calls.write, calls.hold, calls.syscall
    attribute, first = attributes
    is_copy, is_batch, is_launch = int(Op.COPY), int(Op.BATCH), int(Op.LAUNCH)
    is_record, is_wait, is_write, is_hold = int(Op.RECORD), int(Op.WAIT), int(Op.WRITE), int(Op.HOLD)
    futex, wake, everybody = FUTEX, WAKE_OP, EVERYBODY

    def run(table: Ints, errors: npt.NDArray[np.int64]) -> None:
        for row in range(table.shape[0]):
            op, a, b, c = table[row, 0], table[row, 1], table[row, 2], table[row, 3]
            d, e, f, owner = table[row, 4], table[row, 5], table[row, 6], table[row, 8]
            if op < is_record and owner >= 0 and errors[owner] != 0:
                continue
            code = 0
            if op == is_batch:
                code = copy_batch(a, b, c, d, attribute, first, 1, e)
            elif op == is_copy:
                code = copy(a, b, c, d)
            elif op == is_launch:
                code = launch(a, b, 1, 1, c, 1, 1, d, e, f, 0)
            elif op == is_hold:
                code = hold(a, b, c, 0)
            elif op == is_record:
                code = record(a, b)
            elif op == is_wait:
                code = wait(a, b, 0)
            elif op == is_write:
                code = write(a, b, c, 0)
            else:
                syscall(futex, a, wake, everybody, 0, a, b)
            if code != 0:
                note(errors, owner, code)

    return run
