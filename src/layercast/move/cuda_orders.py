"""What one submission orders of a device: its batches, what they wait for, and in which order their parts move.

Does not know streams, programs or ways.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from layercast.move.base import Flight, Waits
from layercast.plan.pieces import Series


class Run(NamedTuple):
    """Parts of a batch that lie side by side in a wave, from `place` on."""

    batch: int
    parts: range
    place: int


class Orders(NamedTuple):
    """The batches of a wave: what moves, behind which flights, and what a captured forward has to do with it."""

    batches: Sequence[Series]
    after: Sequence[Sequence[Flight]]
    flags: Sequence[int]
    """Addresses of 32-bit words to set behind them; 0 = none."""
    behind: Sequence[int]
    """Addresses of words that they wait for; 0 = none."""
    waits: Waits

    def runs(self) -> list[Run]:
        """All parts in the order in which they move, those of a batch that follow each other together."""
        if len(self.batches) == 1:
            return [Run(0, range(len(self.batches[0].shifts)), 0)]
        turns = enumerate(series.turns for series in self.batches)
        order = sorted((turn, batch, nth) for batch, ours in turns for nth, turn in enumerate(ours))
        parts = [part for _, *part in order]
        heads = [at for at, (batch, nth) in enumerate(parts) if not at or parts[at - 1] != [batch, nth - 1]]
        spans = [(first, last, *parts[first]) for first, last in pairwise([*heads, len(parts)])]
        return [Run(batch, range(nth, nth + last - first), first) for first, last, batch, nth in spans]

    def places(self, runs: Sequence[Run]) -> list[list[int]]:
        """Where in the wave the parts of each batch stand."""
        places: list[list[int]] = [[] for _ in self.batches]
        for batch, parts, place in runs:
            places[batch] += range(place, place + len(parts))
        return places

    def growing(self, runs: Sequence[Run]) -> list[Sequence[Run]]:
        """The first part and the others, written while it moves; in growing parts where each has its table."""
        (batch, parts, place), *others = runs
        rest = [Run(batch, parts[1:], place + 1)] if len(parts) > 1 else []
        runs = [Run(batch, parts[:1], place), *rest, *others]
        if len({id(self.batches[run.batch].pieces.table) for run in runs}) == 1:
            return [some for some in (runs[:1], runs[1:]) if some]
        ends = [1, *(4**nth for nth in range(1, len(runs).bit_length() // 2 + 2))]
        return [runs[first:last] for first, last in pairwise([0, *ends]) if first < len(runs)]
