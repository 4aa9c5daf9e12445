"""Columns: which byte ranges of a block move in one layer, or in a window of layers.

Does not know which blocks move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Columns:
    """Byte ranges of one block that move, as absolute addresses for block 0, with both block strides."""

    source: Ints
    target: Ints
    length: Ints
    source_stride: Ints
    target_stride: Ints


def columns_of(source: Ints, target: Ints, length: Ints, source_stride: int, target_stride: int) -> Columns:
    """Columns whose ranges share one pair of block strides."""
    return Columns(source, target, length, np.full_like(length, source_stride), np.full_like(length, target_stride))


def shifts_of(columns: Mapping[int, Columns]) -> dict[int, tuple[int, int]]:
    """For each layer how far all its columns lie from those of the first; nothing where that is not one distance."""
    shifts: dict[int, tuple[int, int]] = {}
    first = next(iter(columns.values()), None)
    for layer, mine in columns.items():
        assert first is not None
        alike = all(np.array_equal(getattr(mine, name), getattr(first, name)) for name in _SHAPE)
        if not alike or not len(mine.length):
            return {}
        source, target = np.unique(mine.source - first.source), np.unique(mine.target - first.target)
        if len(source) != 1 or len(target) != 1:
            return {}
        shifts[layer] = (int(source[0]), int(target[0]))
    return shifts


_SHAPE = ("length", "source_stride", "target_stride")


def merged_columns(parts: Sequence[Columns]) -> Columns:
    """All ranges of several column lists, joined where they touch on both sides and step alike."""
    if not parts:
        return Columns(*(np.zeros(0, np.int64) for _ in Columns.__slots__))
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in Columns.__slots__]
    order = np.argsort(joined[0], kind="stable")
    source, target, length, source_stride, target_stride = (array[order] for array in joined)
    touches = (
        (source[:-1] + length[:-1] == source[1:])
        & (target[:-1] + length[:-1] == target[1:])
        & (source_stride[:-1] == source_stride[1:])
        & (target_stride[:-1] == target_stride[1:])
    )
    first = np.concatenate([[True], ~touches])
    heads = np.flatnonzero(first)
    lengths = np.add.reduceat(length, heads)
    return Columns(source[heads], target[heads], lengths, source_stride[heads], target_stride[heads])
