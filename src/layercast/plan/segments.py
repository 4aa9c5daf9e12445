"""Matching byte ranges of one block between two planes that may order their axes differently.

Does not know block ids, layers or requests.
"""

import numpy as np
import numpy.typing as npt

from layercast.errors import LayoutMismatch, WholeBlocksOnly
from layercast.spec.planes import Plane

Ints = npt.NDArray[np.int64]
Cuts = dict[str, tuple[int, int, int]]
"""Axis name to (first index in the source, first index in the target, number of indices)."""


def matched_segments(source: Plane, target: Plane, cuts: Cuts | None = None) -> tuple[Ints, Ints, Ints]:
    """(source offsets, target offsets, lengths) of a block's ranges, relative to the block's start.

    Axes not in `cuts` move whole and must have equal sizes. Ranges are as long as both sides allow.
    Raises WholeBlocksOnly for a cut along an axis the plane does not list, LayoutMismatch for other shapes.
    """
    cuts = cuts or {}
    for name in cuts:
        if source.axis(name) is None or target.axis(name) is None:
            raise WholeBlocksOnly(f"{source.name}: can't be cut along {name!r}; it moves in whole blocks")
    if source.item_bytes != target.item_bytes:
        raise LayoutMismatch(f"{source.name}: elements of {source.item_bytes} and of {target.item_bytes} bytes")
    axes = _axes(source, target, cuts)
    run = source.item_bytes
    outer = []
    growing = True
    for size, from_stride, to_stride in sorted(axes, key=lambda axis: (axis[2], axis[1])):
        if size == 1:
            continue
        if growing and from_stride == run and to_stride == run:
            run *= size
        else:
            growing = False
            outer.append((size, from_stride, to_stride))
    from_ = np.array([_start(source, cuts, 0)], np.int64)
    to = np.array([_start(target, cuts, 1)], np.int64)
    for size, from_stride, to_stride in outer:
        steps = np.arange(size, dtype=np.int64)[:, None]
        from_ = (steps * from_stride + from_).ravel()
        to = (steps * to_stride + to).ravel()
    return from_, to, np.full(len(from_), run, np.int64)


def _axes(source: Plane, target: Plane, cuts: Cuts) -> list[tuple[int, int, int]]:
    """(size, source stride, target stride) of every axis that moves."""
    if {dim.name for dim in source.dims} != {dim.name for dim in target.dims}:
        raise LayoutMismatch(f"{source.name}: axes {source.dims} against {target.dims}")
    axes = []
    for dim in source.dims:
        other = target.axis(dim.name)
        assert other is not None
        if dim.name in cuts:
            first, second, size = cuts[dim.name]
            if size < 1 or min(first, second) < 0 or first + size > dim.size or second + size > other.size:
                raise LayoutMismatch(f"{source.name}: cut {cuts[dim.name]} of axis {dim.name!r} is out of range")
        elif dim.size != other.size:
            raise LayoutMismatch(f"{source.name}: axis {dim.name!r} has {dim.size} against {other.size}")
        else:
            size = dim.size
        axes.append((size, dim.stride, other.stride))
    return axes


def _start(plane: Plane, cuts: Cuts, side: int) -> int:
    """Offset in bytes of the first index of every cut."""
    total = 0
    for name, cut in cuts.items():
        dim = plane.axis(name)
        assert dim is not None
        total += cut[side] * dim.stride
    return total
