"""What tests of movers share: the loops that issue, and what happens while nobody else has the interpreter."""

import sys
import time
from contextlib import contextmanager

import pytest

from layercast.move.cuda_issue import compiled_issue, plain_issue

LOOPS = {"plain": plain_issue, "compiled": compiled_issue}


def loop_of(name):
    """How the loop of that name is made; skips where it can't be."""
    if name == "compiled":
        pytest.importorskip("numba", reason="numba is not installed, so there is no compiled loop to test")
    return LOOPS[name]


@contextmanager
def interpreter_kept(timeout_s):
    """No other thread gets the interpreter, as long as this one gives it up by no call of its own."""
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(2 * timeout_s)
        yield
    finally:
        sys.setswitchinterval(interval)


def spun(byte, value, timeout_s):
    """Whether a byte comes to a value within so many seconds of looking at it without a rest."""
    deadline = time.monotonic() + timeout_s
    while byte.value != value and time.monotonic() < deadline:
        pass
    return byte.value == value
