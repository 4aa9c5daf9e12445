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


def checked_ids(ids: Sequence[int], blocks: int, owner: str) -> Ints:
    """Block ids as an array. Raises BadBlocks for one outside [0, blocks)."""
    try:
        numbers = np.frombuffer(pack(f"{len(ids)}q", *ids), np.int64)  # a fifth of the time that numpy takes for a list
    except StructError as error:
        raise BadBlocks(f"{owner}: a block is outside 0..{blocks - 1}: {error}") from error
    if (numbers.view(np.uint64) >= blocks).any():  # as which those below 0 are too large as well
        bad = numbers[(numbers < 0) | (numbers >= blocks)][0]
        raise BadBlocks(f"{owner}: block {bad} is outside 0..{blocks - 1}")
    return numbers


def runs_of(source: Ints, target: Ints) -> BlockRuns:
    """Maximal runs of block pairs, in order of the source id."""
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
