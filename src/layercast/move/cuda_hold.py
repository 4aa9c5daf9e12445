"""How a forward's stream is made to wait for a flight: one compiled call (numba, where installed), or one in Python.

Between two layers a forward washes our code out of the caches, and whatever is called then costs microseconds: so it is
little. Neither knows gates or layers.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from layercast.move.cuda_driver import Calls
from layercast.move.cuda_pace import HANDED, LOW
from layercast.move.cuda_rows import PACE

FIRST, OVER, ERRORS = 0, 1, 2
"""A wave's words: the number of its first flight, 0 until it is queued; 1 once it has ended; and from there on the code
with which the device has refused each of its flights."""
PASSED, LATER, REFUSED = 0, 1, 2
Hold = Callable[[int, int, int, int], int]
"""hold(wave, tally, place, stream) -> PASSED: the stream waits for the wave's flight of that place, or need not. LATER:
the device has not been handed it, and nothing is done. REFUSED and more: that much more is the driver's error code.

wave, tally: where their words lie. The compiled one keeps the interpreter lock, so that a mover that closes can't take
a tally away that is looked at: its waves have ended before. The other one may give the lock up between two looks.
"""


@lru_cache(maxsize=2)
def compiled_hold(calls: Calls) -> Hold:
    """Compiled by numba when made: a second. Raises ImportError where numba is not."""
    from numba import njit

    hold = njit(plain_hold(calls))
    over = np.ones(ERRORS + 1, np.int64)
    hold(over.ctypes.data, 0, 0, 0)
    return hold  # type: ignore[no-any-return]


def best_hold(calls: Calls) -> Hold:
    """The compiled one where numba is installed, else the plain one."""
    try:
        return compiled_hold(calls)
    except ImportError:
        return plain_hold(calls)


def plain_hold(calls: Calls) -> Hold:
    """In Python, over ctypes."""
    fetch, hold, low, half = calls.fetch, calls.hold, LOW, LOW >> 1
    first, over, errors, handed = FIRST, OVER, 8 * ERRORS, PACE + 8 * HANDED
    passed, later, refused = PASSED, LATER, REFUSED

    def run(wave: int, tally: int, place: int, stream: int) -> int:
        words, count = np.empty(2, np.int64), np.zeros(1, np.int64)
        fetch(words.ctypes.data, wave, 16)
        if words[over] != 0:
            return passed
        if words[first] == 0:
            return later
        number = (words[first] + place) & low
        fetch(count.ctypes.data, tally, 4)
        if ((count[0] - number) & low) <= half:
            return passed
        fetch(count.ctypes.data, tally + handed, 4)
        if ((count[0] - number) & low) > half:
            return later
        fetch(words.ctypes.data, wave + errors + 8 * place, 8)
        if words[0] != 0:
            return passed
        code = hold(stream, tally, number, 0)
        return refused + code if code != 0 else passed

    return run
