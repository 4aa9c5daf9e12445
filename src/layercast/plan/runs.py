"""Runs: stretches of blocks that are adjacent on both sides, from the ids that an engine names.

Does not know what a block holds.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from layercast.errors import BadBlocks

Ints = npt.NDArray[np.int64]
_HALF = 32
"""Bits of a block's id, at most."""


class BlockRuns(NamedTuple):
    """Stretches of blocks adjacent on both sides: first source id, first target id, number of blocks.

    step: 1 where target ids ascend with the source ids, -1 where they descend. pairs: (source block, target block) of
    every block, in the order of the runs.
    """

    source: Ints
    target: Ints
    blocks_each: Ints
    step: Ints
    pairs: tuple[Ints, Ints]

    @property
    def blocks(self) -> int:
        """Blocks in all runs."""
        return len(self.pairs[0])


def checked_ids(ids: Sequence[int], blocks: int, owner: str) -> Ints:
    """Block ids as an array. Raises BadBlocks for one outside [0, blocks)."""
    try:
        numbers = np.array(array("q", ids))  # a third of the time that numpy takes for a list
    except OverflowError as error:
        raise BadBlocks(f"{owner}: a block is outside 0..{blocks - 1}: {error}") from error
    if (numbers.view(np.uint64) >= blocks).any():  # as which those below 0 are too large as well
        bad = numbers[(numbers < 0) | (numbers >= blocks)][0]
        raise BadBlocks(f"{owner}: block {bad} is outside 0..{blocks - 1}")
    return numbers


def runs_of(source: Ints, target: Ints) -> BlockRuns:
    """Maximal runs of block pairs, in order of the source id."""
    both = (source << _HALF) + target  # numbers sort faster than an order of pairs
    both.sort()
    source, target = both >> _HALF, both & (1 << _HALF) - 1
    if not len(both):
        return BlockRuns(source, target, source, source, (source, target))
    # Targets are distinct, so a step up can't be followed by a step down: runs never need to be cut between the two.
    breaks = (np.abs(both[1:] - both[:-1] - (1 << _HALF)) != 1).nonzero()[0] + 1
    edges = np.empty(len(breaks) + 2, np.int64)
    edges[0], edges[1:-1], edges[-1] = 0, breaks, len(both)
    heads, ends = edges[:-1], edges[1:]
    first = target[heads]
    step = np.where(target[ends - 1] < first, -1, 1)
    return BlockRuns(source[heads], first, ends - heads, step, (source, target))
