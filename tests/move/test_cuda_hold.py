import ctypes
from dataclasses import replace

import numpy as np
import pytest
from host_device import HostDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import LOOPS

from layercast.move.cuda_hold import ERRORS, FIRST, LATER, OVER, PASSED, REFUSED, compiled_hold, plain_hold
from layercast.move.cuda_pace import HANDED
from layercast.move.cuda_rows import PACE, TALLY_BYTES

MOST = 0xFFFFFFFF
HELD: list[tuple[int, ...]] = []
CODE = [0]


def _note(*told):
    HELD.append(told)
    return CODE[0]


CALLS = replace(HostDevice().calls, hold=ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 4)(_note))


def hold_of(loop):
    if loop == "compiled":
        pytest.importorskip("numba", reason="numba is not installed, so there is nothing compiled to test")
    return {"plain": plain_hold, "compiled": compiled_hold}[loop](CALLS)


def reached(count, number):
    """Whether a count that wraps round has come that far."""
    return (count - number) % (1 << 32) < 1 << 31


NEAR = st.sampled_from([0, 1, 1 << 30, (1 << 31) - 1, 1 << 31, MOST - 1, MOST])
NUMBERS = st.builds(lambda near, off: (near + off) & MOST, NEAR, st.integers(-3, 3))


@pytest.mark.parametrize("loop", LOOPS)
@settings(deadline=None)  # the first one compiles
@given(
    first=st.builds(lambda turns, number: (turns << 32) + number, st.integers(0, 3), NUMBERS),
    place=st.integers(0, 4),
    over=st.booleans(),
    refused=st.booleans(),
    moved=NUMBERS,
    handed=NUMBERS,
    code=st.sampled_from([0, 1, 700]),
)
def test_a_stream_waits_for_what_the_device_has_been_handed_and_has_neither_moved_nor_refused(
    loop, first, place, over, refused, moved, handed, code
):
    wave, tally = np.zeros(ERRORS + 5, np.int64), np.zeros(TALLY_BYTES // 8, np.int64)
    wave[FIRST], wave[OVER], wave[ERRORS + place] = first, over, 9 * refused
    tally.view(np.uint32)[0], tally.view(np.uint32)[PACE // 4 + 2 * HANDED] = moved, handed
    CODE[0], number = code, (first + place) & MOST
    HELD.clear()
    told = hold_of(loop)(wave.ctypes.data, tally.ctypes.data, place, 77)
    wanted, held = PASSED, []
    if not over and not (first and reached(moved, number)):
        if not first or not reached(handed, number):
            wanted = LATER
        elif not refused:
            wanted, held = REFUSED + code if code else PASSED, [(77, tally.ctypes.data, number, 0)]
    assert told == wanted
    assert held == HELD


@pytest.mark.parametrize("loop", LOOPS)
def test_a_tally_is_not_looked_at_once_the_wave_is_over(loop):
    """A mover that has closed has given it back."""
    wave = np.zeros(ERRORS + 1, np.int64)
    wave[FIRST], wave[OVER] = 1, 1
    assert hold_of(loop)(wave.ctypes.data, 0, 0, 77) == PASSED
