"""A relay: launches take turns on two streams, so that one fills the device while the last of another still ends.

A third stream goes on behind each of them in their order, and counts: a launch does not wait for the count of the one
before. Does not know what a launch does, nor who counts what.
"""

from dataclasses import dataclass, field

import numpy as np

from layercast.move.cuda_program import Ints
from layercast.move.words import address_of


@dataclass(frozen=True, slots=True)
class Relay:
    """Streams that launches take turns on, the one that goes on behind each, and an event for each turn.

    words: the five numbers; address: where they lie, as programs name it.
    """

    turns: tuple[int, int]
    behind: int
    events: tuple[int, int]
    words: Ints = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", np.array([*self.turns, self.behind, *self.events], np.int64))
        object.__setattr__(self, "address", address_of(self.words))

    @property
    def streams(self) -> tuple[int, ...]:
        """Those that take turns, and the one that goes on behind."""
        return *self.turns, self.behind
