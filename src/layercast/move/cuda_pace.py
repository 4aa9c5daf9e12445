"""Paces: how far what a lane has handed over may be ahead of what the device has moved.

A device takes the copies of a direction as they come: whatever else the process copies that way (the inputs of a
forward, its tokens) waits for all that was handed over before it, on whatever stream. A mark costs the device a pause.
Does not know programs, lanes or flights.
"""

from collections.abc import Callable

import numpy as np

from layercast.move.cuda_driver import Calls
from layercast.move.words import words_at

NAP_US, NAPS = 10, 20000
"""Between two looks at a pace, and the most of them a call: what waits for a long forward goes on after a second. Linux
adds 50 us to a nap; to have none added (PR_SET_TIMERSLACK) made no load or save faster where marks lie 16 MiB apart."""
PACE_WORDS = 5
"""A pace: int64 words in pinned memory. Marks that the device has passed (its low half), marks handed over, bytes since
the last, how many marks may be ahead, and after how many bytes the next is due."""
LOW = 0xFFFFFFFF
"""The bits that a device writes of a count."""
_PASSED, _MARKED, _SINCE, _AHEAD, _DUE = range(PACE_WORDS)


class Pace:
    """What a lane's copies keep to: at most `ahead` marks, one every `nbytes`. Its words lie at `address`."""

    def __init__(self, address: int, ahead: int, nbytes: int) -> None:
        self.address = address
        words = words_at(address, 2 * PACE_WORDS)
        words[:] = 0
        words[::2][_AHEAD], words[::2][_DUE] = ahead, nbytes


def pacing(calls: Calls) -> Callable[[int, int, int], int]:
    """(pace, stream, bytes just handed over) -> error code; returns once more may be under way."""
    write, fetch, rest = calls.write, calls.fetch, calls.rest
    nap_us, naps, low, words = NAP_US, NAPS, LOW, PACE_WORDS
    passed, marked, since, ahead, due = _PASSED, _MARKED, _SINCE, _AHEAD, _DUE

    def run(pace: int, stream: int, nbytes: int) -> int:
        code, looks, state = 0, 0, np.zeros(words, np.int64)
        at = state.ctypes.data
        fetch(at, pace, 8 * words)
        state[since] += nbytes
        if state[since] >= state[due]:
            state[marked], state[since] = state[marked] + 1, 0
            code = write(stream, pace, state[marked] & low, 0)
            while code == 0 and ((state[marked] - state[passed]) & low) >= state[ahead] and looks < naps:
                rest(nap_us)
                fetch(at, pace, 8)
                looks += 1
        fetch(pace + 8 * marked, at + 8 * marked, 16)
        return code

    return run
