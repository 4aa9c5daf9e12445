"""An engine's block tables: which of its blocks are to be moved. Does not know keys, slots or who moves them."""

from collections.abc import Sequence
from typing import TypeVar, cast

from layercast.errors import BadBlocks
from layercast.spec.groups import GroupKind, GroupSpec

T = TypeVar("T")
Table = Sequence[int | None]
"""Engine block of each block index of one group; None where none is allocated."""
Held = tuple[Sequence[int], Sequence[int]]
"""Block indices, ascending, and the engine blocks that have their bytes."""


def at_indices(values: Sequence[T], indices: Sequence[int]) -> Sequence[T]:
    """The values at some indices, fast where these are a range."""
    if isinstance(indices, range) and indices.step == 1:
        return values[indices.start : indices.stop]
    return [values[index] for index in indices]


def allocated(spec: GroupSpec, table: Table, indices: Sequence[int]) -> Sequence[int]:
    """Those of the indices that can be loaded: what the engine has no memory for has left the window."""
    if spec.kind is not GroupKind.WINDOW:
        return indices
    return [index for index in indices if table[index] is not None]


def blocks_at(table: Table, indices: Sequence[int]) -> tuple[int, ...]:
    """The engine blocks at some indices. Raises BadBlocks where there is none."""
    blocks = at_indices(table, indices)
    if not all(blocks) and None in blocks:  # the first is the faster question
        index = indices[blocks.index(None)]
        raise BadBlocks(f"block {index} is to be moved, but the engine has allocated no memory for it")
    return tuple(cast(Sequence[int], blocks))


def ending(spec: GroupSpec, table: Table, before: int, after: int) -> Held:
    """The blocks that end in (before, after] and that the engine holds.

    Of a recurrent group these are the snapshots it took; elsewhere a block that slid out of a window has gone.
    """
    first, last = before // spec.block_size, after // spec.block_size
    blocks = table[first:last]
    if None not in blocks:
        return range(first, first + len(blocks)), cast(Sequence[int], blocks)
    held = {index: block for index, block in enumerate(blocks, first) if block is not None}
    return tuple(held), tuple(held.values())
