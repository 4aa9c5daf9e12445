"""Runs: stretches of blocks that are adjacent on both sides, from the ids that an engine names.

Does not know what a block holds.
"""

from collections.abc import Sequence
from struct import error as StructError
from struct import pack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from layercast.errors import BadBlocks

Ints = npt.NDArray[np.int64]
_HALF, _LOW = 32, 0xFFFFFFFF
"""Bits of a block's id, at most, and all of them set."""


class BlockRuns(NamedTuple):
    """Stretches of blocks adjacent on both sides: first source id, first target id, number of blocks.

    step: 1 where target ids ascend with the source ids, -1 where they descend. joined: every pair of blocks, ascending,
    as one number, since numbers sort faster than an order of pairs: the source id times 2 ** 32, and the target id.
    """

    source: Ints
    target: Ints
    blocks_each: Ints
    step: Ints
    joined: Ints

    @property
    def pairs(self) -> tuple[Ints, Ints]:
        """(source block, target block) of every block, in the order of the runs."""
        return self.joined >> _HALF, self.joined & _LOW

    @property
    def blocks(self) -> int:
        """Blocks in all runs."""
        return len(self.joined)


def checked_ids(sides: tuple[Sequence[int], Sequence[int]], blocks: tuple[int, int], owner: str) -> Ints:
    """Equally many ids of source and target as an array [2, ids]. Raises BadBlocks for one outside [0, blocks)."""
    source, target = sides
    try:  # a fifth of the time that numpy takes for a list
        ids = np.frombuffer(pack(f"{2 * len(source)}q", *source, *target), np.int64).reshape(2, -1)
    except StructError as error:
        raise BadBlocks(f"{owner}: a block is outside 0..{max(blocks) - 1}: {error}") from error
    if np.count_nonzero(ids.view(np.uint64) >= np.array(blocks, np.uint64)[:, None]):  # nor any below 0
        for name, numbers, most in zip(("source", "target"), ids.tolist(), blocks, strict=True):
            if bad := [block for block in numbers if not 0 <= block < most]:
                raise BadBlocks(f"{owner} {name}: block {bad[0]} is outside 0..{most - 1}")
    return ids


def single_run(ids: Ints) -> BlockRuns | None:
    """All pairs (source and target, [2, pairs]) as one run, where they are one, as of an engine that has not run long.

    Else None. A run names no block twice.
    """
    blocks, ends = ids.shape[1], ids[:, :: max(1, ids.shape[1] - 1)].tolist()
    if blocks < 2 or any(abs(last - first) != blocks - 1 for first, last in ends):
        return None
    apart = ids[:, 1:] - ids[:, :-1]
    if np.count_nonzero(apart != apart[:, :1]):
        return None
    (first, last), (there, here) = ends
    up = first < last
    source, target = (first, there) if up else (last, here)
    step = 1 if up == (there < here) else -1
    pair, each = (source << _HALF) + target, (1 << _HALF) + step
    heads = np.array([[source], [target], [blocks], [step]])
    return BlockRuns(heads[0], heads[1], heads[2], heads[3], np.arange(pair, pair + blocks * each, each))


def runs_of(ids: Ints) -> BlockRuns:
    """Maximal runs of block pairs (as above; no target twice), in order of the source id."""
    source, target = ids
    pairs = (source << _HALF) + target
    pairs.sort()
    away = np.zeros(len(pairs), np.int64)
    np.subtract(pairs[1:], pairs[:-1], out=away[:-1])
    away -= 1 << _HALF  # from here on 1 or -1 where the next pair is adjacent on both sides
    # Targets are distinct, so a step up can't be followed by a step down: runs never need to be cut between the two.
    ends = (np.abs(away) != 1).nonzero()[0] + 1
    heads = np.zeros(len(ends), np.int64)
    heads[1:] = ends[:-1]
    away[ends - 1] = 1
    first = pairs[heads]
    return BlockRuns(first >> _HALF, first & _LOW, ends - heads, away[heads], pairs)
