"""Which stretches of memory a set of blocks occupies. Pure; does not know who asks, or why."""

from collections.abc import Sequence

import numpy as np

from layercast.spec.groups import Layout


def block_ranges(layout: Layout, blocks: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(address, bytes) of disjoint stretches, ascending, that hold exactly these blocks of each group.

    Gaps inside a block (padding between its planes) may be included; other blocks never are.
    """
    starts: list[int] = []
    ends: list[int] = []
    for group, ids in zip(layout.groups, blocks, strict=True):
        for layer in group.layers if len(ids) else ():
            for plane in group.planes_of(layer):
                first = plane.base + np.asarray(ids, np.int64) * plane.block_stride
                starts += first.tolist()
                ends += (first + plane.span).tolist()
    merged: list[tuple[int, int]] = []
    for start, end in sorted(zip(starts, ends, strict=True)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return [(start, end - start) for start, end in merged]
