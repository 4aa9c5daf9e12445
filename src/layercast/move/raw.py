"""Copies and digests by raw addresses, done now on the calling thread.

The cost that matters is the interpreter lock: a thread that gives it up and takes it again once a piece waits a few
milliseconds each time beside a busy Python thread. So many pieces go into one call of the kernel, strided runs into one
numpy copy, and short rows are copied with the lock held. Does not know what the bytes mean, nor whether an address is
mapped: a wrong one may end the process.
"""

import ctypes
import os

import numpy as np
import numpy.typing as npt
import xxhash

from layercast.move.base import Digests
from layercast.plan.pieces import DigestRanges, Pieces

_FEW = 4
"""Up to this many rows or pieces, one call each costs less than preparing one call for all."""
_LONG = 1 << 20
"""From here the copy itself outweighs any call."""
_SHORT = 16 << 10
"""Below this, taking the interpreter lock again costs more than holding it through the copy."""
_MOST_AT_ONCE = 1024
"""Pieces in one call of the kernel (its IOV_MAX)."""

_libc = ctypes.CDLL(None)
_copy_unlocked = ctypes.memmove
_copy_locked = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", _libc))
_readv = getattr(_libc, "process_vm_readv", None)  # Linux; elsewhere, or where it is forbidden, piece by piece
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


def copy(pieces: Pieces) -> None:
    """Copy all pieces. The interpreter lock is free during longer copies."""
    plain = (pieces.count == 1) & (pieces.length < _LONG)
    if plain.sum() > _FEW:
        _copy_plain(pieces.take(np.flatnonzero(plain)))
        pieces = pieces.take(np.flatnonzero(~plain))
    columns = (pieces.source, pieces.target, pieces.length, pieces.count, pieces.source_stride, pieces.target_stride)
    for source, target, length, count, source_step, target_step in zip(*(c.tolist() for c in columns), strict=True):
        if _suits_views(source, target, length, count, source_step, target_step):
            np.copyto(_rows(target, length, count, target_step), _rows(source, length, count, source_step))
        else:
            for row in range(count):
                _copy_row(target + row * target_step, source + row * source_step, length)


def digests_of(ranges: DigestRanges) -> Digests:
    """The 64-bit XXH3 of every row's bytes, its ranges joined in order."""
    rows, lengths = ranges.addresses.tolist(), ranges.length.tolist()
    if not rows or not lengths:
        return np.full(len(rows), xxhash.xxh3_64_intdigest(b""), np.uint64)
    base = int(ranges.addresses.min())
    # One view over everything: slices of it are far cheaper than a view each. Holes in it are never touched.
    span = memory_at(base + ranges.shift, int((ranges.addresses + ranges.length).max()) - base)
    found = np.empty(len(rows), np.uint64)
    for index, row in enumerate(rows):
        state = xxhash.xxh3_64()
        for address, length in zip(row, lengths, strict=True):
            state.update(span[address - base : address - base + length])
        found[index] = state.intdigest()
    return found


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of raw memory. Whoever owns it must keep it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _copy_plain(pieces: Pieces) -> None:
    """Pieces of count 1, each short of `_LONG`, many in one call."""
    for first in range(0, len(pieces), _MOST_AT_ONCE):
        some = pieces.take(slice(first, first + _MOST_AT_ONCE))
        if not _copied_at_once(some):
            for source, target, length in zip(
                some.source.tolist(), some.target.tolist(), some.length.tolist(), strict=True
            ):
                _copy_row(target, source, length)


def _copied_at_once(pieces: Pieces) -> bool:
    """Let the kernel copy within this process. False where it can't (no such call, or memory it won't touch)."""
    if _readv is None:
        return False
    to = np.stack([pieces.target, pieces.length], axis=1)
    from_ = np.stack([pieces.source, pieces.length], axis=1)
    copied = _readv(os.getpid(), to.ctypes.data, len(to), from_.ctypes.data, len(from_), 0)
    return bool(copied == int(pieces.length.sum()))


def _copy_row(target: int, source: int, length: int) -> None:
    (_copy_locked if length < _SHORT else _copy_unlocked)(target, source, length)


def _rows(address: int, length: int, count: int, step: int) -> npt.NDArray[np.uint8]:
    """Raw memory as [count, length] bytes, rows `step` apart, forward or backward."""
    reach = (count - 1) * step
    span = memory_at(address + min(reach, 0), abs(reach) + length)
    return np.ndarray((count, length), np.uint8, span, max(-reach, 0), (step, 1))


def _suits_views(source: int, target: int, length: int, count: int, source_step: int, target_step: int) -> bool:
    """Whether one numpy copy is right: many short rows that don't overlap, in two disjoint stretches.

    Where the stretches interleave, numpy would copy through a buffer of its own.
    """
    if count <= _FEW or length >= _LONG or min(abs(source_step), abs(target_step)) < length:
        return False
    source_reach, target_reach = (count - 1) * source_step, (count - 1) * target_step
    source_end, target_end = (
        at + max(reach, 0) + length for at, reach in ((source, source_reach), (target, target_reach))
    )
    return source_end <= target + min(target_reach, 0) or target_end <= source + min(source_reach, 0)
