import ctypes

import numpy as np
import pytest
from host_device import HostDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from layercast.move.cuda_issue import FIRST, MOST, compiled_issue, plain_issue
from layercast.move.cuda_program import Program
from layercast.testing.move_laws import pieces_of


class Copies(HostDevice):
    """Notes every copy instead of doing it."""

    def __init__(self):
        super().__init__()
        self.copies, self.calls_of = [], []

    def _copy(self, to, from_, nbytes, _stream):
        self.copies.append((from_, to, nbytes))

    def _copy_batch(self, to, from_, nbytes, count, *_rest):
        rows = [(ctypes.c_int64 * count).from_address(at)[:] for at in (from_, to, nbytes)]
        self.copies += zip(*rows, strict=True)
        self.calls_of.append(count)


@pytest.fixture(scope="module", params=["plain", "compiled"])
def device(request):
    if request.param == "compiled":
        pytest.importorskip("numba", reason="numba is not installed, so there is no compiled loop to test")
    device = Copies()
    device.issue = {"plain": plain_issue, "compiled": compiled_issue}[request.param](device.calls, (0, 0))
    return device


def copied(device, pieces, cuts=(), *, batched=True):
    device.copies.clear()
    device.calls_of.clear()
    program, errors = Program(), np.zeros(1, np.int64)
    program.copies([pieces], 1, batched=batched)
    device.issue(program.table(), program.longest, np.array(sorted(cuts), np.int64), errors)
    assert not errors.any()
    return device.copies


@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 200),
            st.integers(0, 200),
            st.integers(0, 90),
            st.integers(0, 3),
            st.integers(-9, 9),
            st.integers(-9, 9),
        ),
        max_size=6,
    ),
    cuts=st.sets(st.integers(0, 300), max_size=6),
    batched=st.booleans(),
)
def test_copies_are_the_runs_row_by_row_and_cross_no_cut(device, rows, cuts, batched):
    got = copied(device, pieces_of(*rows), cuts, batched=batched)
    wanted = [
        (source + row * down + i, target + row * up + i)
        for source, target, length, count, down, up in rows
        for row in range(count)
        for i in range(length)
    ]
    assert [(a + i, b + i) for a, b, n in got for i in range(n)] == wanted
    assert all(n > 0 and not any(a < c < a + n or b < c < b + n for c in cuts) for a, b, n in got)


def test_calls_of_the_driver_begin_small_and_grow(device):
    copied(device, pieces_of(*((i * 64, i * 64, 64) for i in range(2000))))
    assert device.calls_of[0] == FIRST
    assert max(device.calls_of) == MOST
    assert sum(device.calls_of) == 2000
