"""Batches: the pieces of a window of layers, cut so that no batch handed to a mover exceeds the limits.

Does not know requests, deadlines or devices.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from layercast.errors import Refused
from layercast.plan.pieces import CopyPlan, Ints, Pieces


@lru_cache(maxsize=64)
def windows_of(layers: tuple[int, ...], window: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive layers in windows of that many; 0 = all in one (bulk)."""
    step = window or max(1, len(layers))
    return tuple(layers[at : at + step] for at in range(0, len(layers), step))


@lru_cache(maxsize=64)
def windows_by_layer(layers: tuple[int, ...], window: int) -> Mapping[int, tuple[int, ...]]:
    """The same: for each layer its window."""
    return {layer: ours for ours in windows_of(layers, window) for layer in ours}


def batches_of(plan: CopyPlan, layers: Sequence[int], max_blocks: int = 0, max_bytes: int = 0) -> list[Pieces]:
    """The pieces of a window of layers in batches within the limits; together they copy each byte once.

    max_blocks: of the group, whatever the number of layers; max_bytes: over all of them; 0 = no limit.
    Blocks are shared out first, then bytes: strided pieces by rows, and a row that is too long inside itself.
    """
    if min(max_blocks, max_bytes) < 0:
        raise Refused(f"limits of {max_blocks} blocks and {max_bytes} bytes: 0 means none, and less means nothing")
    batches: list[Pieces] = []
    for part in _parts(plan, max_blocks):
        pieces = part.window(layers)
        if max_bytes and pieces.nbytes > max_bytes:
            batches += _packed(_split(pieces, max_bytes), max_bytes)
        elif len(pieces):
            batches.append(pieces)
    return batches


def _parts(plan: CopyPlan, most: int) -> Iterator[CopyPlan]:
    if not most or plan.blocks <= most:
        yield plan
        return
    for first in range(0, plan.blocks, most):
        yield plan.part(first, first + most)


def _split(pieces: Pieces, most: int) -> Pieces:
    """Equal copies in which no piece has more than `most` bytes."""
    rows = np.maximum(1, most // pieces.length)
    index, nth = _expanded(-(-pieces.count // rows))
    first = nth * rows[index]
    count = np.minimum(rows[index], pieces.count[index] - first)
    steps = (count > 1).astype(np.int64)
    short = Pieces.of(
        pieces.source[index] + first * pieces.source_stride[index],
        pieces.target[index] + first * pieces.target_stride[index],
        pieces.length[index],
        count,
        pieces.source_stride[index] * steps,
        pieces.target_stride[index] * steps,
    )
    index, nth = _expanded(-(-short.length // most))
    skip = nth * most
    cut = short.take(index)
    length = np.minimum(most, cut.length - skip)
    return Pieces.of(cut.source + skip, cut.target + skip, length, cut.count, cut.source_stride, cut.target_stride)


def _expanded(parts: Ints) -> tuple[Ints, Ints]:
    """(index of the whole, number within it) of every part."""
    index = np.repeat(np.arange(len(parts), dtype=np.int64), parts)
    return index, np.arange(len(index), dtype=np.int64) - (np.cumsum(parts) - parts)[index]


def _packed(pieces: Pieces, most: int) -> list[Pieces]:
    """Pieces of at most `most` bytes each, put together in order."""
    ends = np.cumsum(pieces.length * pieces.count)
    batches, first, filled = [], 0, 0
    while first < len(pieces):
        last = int(np.searchsorted(ends, filled + most, side="right"))
        batches.append(pieces.take(slice(first, last)))
        first, filled = last, int(ends[last - 1])
    return batches
