"""Columns: which byte ranges of a block move in one layer, or in a window of layers.

Does not know which blocks move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Stacked(NamedTuple):
    """Columns as they are spread over runs, source before target: each array is [.., columns, 1].

    fills: whether a range is as long as both block strides.
    """

    at: Ints
    strides: Ints
    nbytes: Ints
    fills: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """Byte ranges of one block that move, as absolute addresses for block 0, with both block strides."""

    source: Ints
    target: Ints
    length: Ints
    source_stride: Ints
    target_stride: Ints

    @cached_property
    def stacked(self) -> Stacked:
        """The same for who spreads them: plans come and go, and columns last."""
        strides, nbytes = np.stack([self.source_stride, self.target_stride])[..., None], self.length[:, None]
        return Stacked(
            np.stack([self.source, self.target])[..., None], strides, nbytes, (strides == nbytes).all(axis=0)
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a block that move."""
        return int(self.length.sum())


_NAMES = tuple(field.name for field in fields(Columns))


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
        return Columns(*(np.zeros(0, np.int64) for _ in _NAMES))
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in _NAMES]
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
