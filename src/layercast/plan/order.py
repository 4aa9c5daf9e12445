"""The order in which batches of many owners (loads, saves) are issued: by the layer that needs them first.

Layer 0 of every owner comes before any layer 1. Inside a layer owners take turns, a batch each, those that have had
none yet first, so that a newcomer of the layer that is next waits for nothing of a large load but what is under way.
Pure: no clock and no threads; its user guards it.
"""

from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class DeadlineQueue(Generic[Batch]):
    """Batches that wait to be issued; those of one owner and layer keep their order."""

    def __init__(self) -> None:
        self._owners: dict[str, list[tuple[int, int, Batch]]] = {}
        """Heaps of (layer, number, batch), none of them empty."""
        self._served: dict[str, tuple[int, int]] = {}
        """The layer in which an owner had its last turn, and when."""
        self._numbers = count(1)
        self._last = 0

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def __bool__(self) -> bool:
        return bool(self._owners)

    @property
    def last_layer(self) -> int:
        """A layer before which all lies that is queued; 0 where nothing is."""
        return self._last if self._owners else 0

    def push(self, batch: Batch, *, layer: int, owner: str) -> None:
        """Queue a batch for the layer that needs it (of a window: its first)."""
        self._last = max(layer, self.last_layer)
        heappush(self._owners.setdefault(owner, []), (layer, next(self._numbers), batch))

    def pop(self) -> Batch | None:
        """Take out the batch that is to go next; None if there is none."""
        if not self._owners:
            return None
        owner = min(self._owners, key=self._turn)
        layer, _, batch = heappop(self._owners[owner])
        self._served[owner] = layer, next(self._numbers)
        if not self._owners[owner]:
            self.remove(owner)
        return batch

    def remove(self, owner: str) -> list[Batch]:
        """Take out everything of an owner (an abort): its batches by layer, in their order."""
        self._served.pop(owner, None)
        return [batch for _, _, batch in sorted(self._owners.pop(owner, ()))]

    def _turn(self, owner: str) -> tuple[int, int, int]:
        """What tells whose turn comes first: the layer, the last turn in it (0: none so far), and who came first."""
        layer, number, _ = self._owners[owner][0]
        served, when = self._served.get(owner, (-1, 0))
        return layer, when if served == layer else 0, number
