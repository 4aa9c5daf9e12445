"""32-bit words that one thread posts and another sleeps on, without the interpreter lock on either side (Linux futex).

A compiled loop can post with one system call, which stores and wakes. Does not know what a word stands for.
"""

import ctypes
import platform
import time

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]

POSTED, DROPPED = 1, 2
"""A word's values once it is no longer 0: what it stands for has happened, or never will."""
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 202)
WAKE_OP = 5 | 128
EVERYBODY = 0x7FFFFFFF
_WAIT = 0 | 128

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype, _syscall.argtypes = ctypes.c_long, [ctypes.c_int64] * 7


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


def stored(value: int) -> int:
    """The last argument of WAKE_OP: set the word to `value`."""
    return value << 12


def words_at(address: int, count: int) -> Words:
    """A view of words in raw memory. Whoever owns it must keep it alive."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


def post(words: Words, index: int, value: int = POSTED) -> None:
    """Set a word and wake whoever sleeps on it."""
    address = words.ctypes.data + 4 * index
    _syscall(FUTEX, address, WAKE_OP, EVERYBODY, 0, address, stored(value))


def sleep_on(words: Words, index: int, timeout_s: float) -> bool:
    """Sleep until the word is not 0; whether it is, after at most `timeout_s` seconds."""
    address, deadline = words.ctypes.data + 4 * index, time.monotonic() + timeout_s
    while words[index] == 0:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        until = _Timespec(int(left), int(left % 1 * 1e9))
        _syscall(FUTEX, address, _WAIT, 0, ctypes.addressof(until), 0, 0)
    return True
