"""Paces: how far what a lane has handed over may be ahead of what the device has moved.

A device takes the copies of a direction as they come: whatever else the process copies that way (the inputs of a
forward, its tokens) waits for all that was handed over before it, on whatever stream. A mark costs the device a pause.
What a forward waits for is *hurried*: the next one's inputs come no sooner for a pace, and the thread that launches,
which waits until copies are handed over, would be late with all that is behind the last. What goes in the background
*stands aside* while copies of the lane that goes first are under way. Does not know programs, lanes or flights.
"""

from collections.abc import Callable

import numpy as np

from layercast.move.cuda_driver import Calls
from layercast.move.words import Words

NAP_US, NAPS = 10, 20000
"""Between two looks at a pace, and the most of them a call: what waits for a long forward goes on after a second. Linux
adds 50 us to a nap; to have none added (PR_SET_TIMERSLACK) made no load or save faster where marks lie 16 MiB apart."""
ASIDE = 1600
"""Looks for which what goes in the background stands aside for a lane in which nothing moves: 0.1 s or so. Then it goes
on until more is queued there: that may wait for a long forward, or, which nobody intends, for the background itself."""
PACE_WORDS = 10
"""A pace: int64 words in pinned memory. Marks that the device has passed (its low half), marks handed over, bytes since
the last, how many marks may be ahead, after how many bytes the next is due; numbers of the last batch that the device
has been handed, of the last that is hurried, and of the last in the queue; of a lane that goes in the background the
address of the tally of that which goes first, and the last number in its queue when it was no longer waited for."""
HURRIED_AHEAD, RARER = 16, 4
"""Marks ahead of what is hurried, and how much rarer they are: a gibibyte, as a full queue holds up other threads."""
LOW = 0xFFFFFFFF
"""The bits that a device writes of a count."""
_PASSED, _MARKED, _SINCE, _AHEAD, _DUE, HANDED, HURRIED, QUEUED, BEFORE, _GIVEN_UP = range(PACE_WORDS)


def keep(words: Words, ahead: int, nbytes: int) -> None:
    """Have copies keep a pace: at most `ahead` marks, one every `nbytes`. words: int32, the low half of each of its."""
    words[_AHEAD], words[_DUE] = ahead, nbytes


def pacing(calls: Calls) -> Callable[[int, int, int], int]:
    """(pace, stream, bytes just handed over) -> error code; returns once more may be under way."""
    write, fetch, rest = calls.write, calls.fetch, calls.rest
    nap_us, naps, low, words = NAP_US, NAPS, LOW, PACE_WORDS
    passed, marked, since, ahead, due, handed, hurried = _PASSED, _MARKED, _SINCE, _AHEAD, _DUE, HANDED, HURRIED
    far, rarer = HURRIED_AHEAD, RARER

    def run(pace: int, stream: int, nbytes: int) -> int:
        code, looks, state = 0, 0, np.zeros(words, np.int64)
        at = state.ctypes.data
        fetch(at, pace, 8 * words)
        state[since] += nbytes
        hurry = 0 < ((state[hurried] - state[handed]) & low) <= low >> 1
        if state[since] >= state[due] * (rarer if hurry else 1):
            state[marked], state[since] = state[marked] + 1, 0
            code = write(stream, pace, state[marked] & low, 0)
            while (
                code == 0
                and looks < naps
                and ((state[marked] - state[passed]) & low) >= (far if hurry else state[ahead])
            ):
                rest(nap_us)
                fetch(at, pace, 8)
                fetch(at + 8 * hurried, pace + 8 * hurried, 8)
                hurry = 0 < ((state[hurried] - state[handed]) & low) <= low >> 1
                looks += 1
        fetch(pace + 8 * marked, at + 8 * marked, 16)
        return code

    return run


def standing_aside(calls: Calls, queued_at: int) -> Callable[[int], None]:
    """(pace): returns once nothing moves any more of the lane that goes first, if there is one, or this is hurried.

    queued_at: where in a tally the number of the last batch in its queue lies.
    """
    fetch, rest, nap_us, most, low = calls.fetch, calls.rest, NAP_US, ASIDE, LOW
    handed, before, given_up = HANDED, BEFORE, _GIVEN_UP  # and behind what is handed what is hurried

    def run(pace: int) -> None:
        looks, moved, seen = 0, np.int64(-1), np.zeros(6, np.int64)
        at = seen.ctypes.data
        fetch(at + 32, pace + 8 * before, 16)
        tally = seen[4]
        busy = tally != 0
        while busy:
            fetch(at, tally, 8)
            fetch(at + 8, tally + queued_at, 8)
            fetch(at + 16, pace + 8 * handed, 16)
            under_way = ((seen[1] - seen[0]) & low) != 0 and seen[1] != seen[5]
            busy = under_way and not 0 < ((seen[3] - seen[2]) & low) <= low >> 1
            looks, moved = looks + 1 if seen[0] == moved else 0, seen[0]
            if looks == most:
                fetch(pace + 8 * given_up, at + 8, 8)
                busy = False
            if busy:
                rest(nap_us)

    return run
