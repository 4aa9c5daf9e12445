"""The order in which batches of many owners (loads, saves) are issued: by the layer that needs them first.

Layer 0 of every owner comes before any layer 1. Inside a layer owners take turns, a batch each, those that have had
none yet first, so that a newcomer of the layer that is next waits for nothing of a large load but what is under way.
Pure: no clock and no threads; its user guards it.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


@dataclass(slots=True)
class _Turns(Generic[Batch]):
    """The owners of one layer in the order of their turns: those that have had none, then those that have."""

    fresh: dict[str, deque[Batch]] = field(default_factory=dict)
    served: dict[str, deque[Batch]] = field(default_factory=dict)

    def of(self, owner: str) -> dict[str, deque[Batch]]:
        """Where an owner is, or belongs."""
        return self.served if owner in self.served else self.fresh


class DeadlineQueue(Generic[Batch]):
    """Batches that wait to be issued; those of one owner and layer keep their order."""

    def __init__(self) -> None:
        self._layers: dict[int, _Turns[Batch]] = {}

    def __len__(self) -> int:
        every = (owners for turns in self._layers.values() for owners in (turns.fresh, turns.served))
        return sum(len(batches) for owners in every for batches in owners.values())

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def last_layer(self) -> int:
        """The layer behind all that is queued; 0 where nothing is."""
        return max(self._layers, default=0)

    def push(self, batch: Batch, *, layer: int, owner: str) -> None:
        """Queue a batch for the layer that needs it (of a window: its first)."""
        owners = self._layers.setdefault(layer, _Turns()).of(owner)
        owners.setdefault(owner, deque()).append(batch)

    def pop(self) -> Batch | None:
        """Take out the batch that is to go next; None if there is none."""
        if not self._layers:
            return None
        layer = min(self._layers)
        turns = self._layers[layer]
        owners = turns.fresh or turns.served
        owner = next(iter(owners))
        batches = owners.pop(owner)
        batch = batches.popleft()
        if batches:
            turns.served[owner] = batches
        self._tidy(layer)
        return batch

    def remove(self, owner: str) -> list[Batch]:
        """Take out everything of an owner (an abort): its batches by layer, in their order."""
        gone: list[Batch] = []
        for layer in sorted(self._layers):
            gone += self._layers[layer].of(owner).pop(owner, ())
            self._tidy(layer)
        return gone

    def _tidy(self, layer: int) -> None:
        if not (self._layers[layer].fresh or self._layers[layer].served):
            del self._layers[layer]
