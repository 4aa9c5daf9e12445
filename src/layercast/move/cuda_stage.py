"""Memory of a device to stage in: slots that are filled and emptied in turn, with the streams and events for that.

Does not know what is staged, nor which way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from layercast.move.cuda_program import Ints
from layercast.move.words import address_of

SLOTS = 8
"""Parts of the memory: while one fills and one empties, those between them wait for a device that is busy."""
LEAD = SLOTS // 2
"""From a device launches fill so many slots ahead of the one that is emptied."""
HEAD = 2
"""Words before those of the slots: the streams that copy and that launch. Of each slot an event behind what filled it
last, and one behind what emptied it."""
ABOUT = 8
"""Words of how a series is staged: whether up; the kernel's function, programs, threads and shared bytes; where the
words of the slots lie; how copies are handed over, and into how many parts a batch is cut. Behind them, for each part,
where the table of its long copies lies and how many pieces there are."""


@dataclass(frozen=True, slots=True)
class Slots:
    """What is staged in, for programs that name it by `address`. nbytes: of each slot. copy, launch: streams."""

    base: int
    nbytes: int
    copy: int
    launch: int
    events: Sequence[int]
    words: Ints = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", np.array([self.copy, self.launch, *self.events], np.int64))
        object.__setattr__(self, "address", address_of(self.words))
