"""The order in which batches of many owners (loads, saves) are issued: by the layer that needs them first.

Layer 0 of every owner comes before any layer 1. Inside a layer owners take turns, a batch each, in order of arrival, so
that a large load delays a small one by no more than one batch. Pure: no clock and no threads; its user guards it.
"""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class DeadlineQueue(Generic[Batch]):
    """Batches that wait to be issued; those of one owner and layer keep their order."""

    def __init__(self) -> None:
        self._layers: dict[int, OrderedDict[str, deque[Batch]]] = {}

    def __len__(self) -> int:
        return sum(len(batches) for owners in self._layers.values() for batches in owners.values())

    def __bool__(self) -> bool:
        return bool(self._layers)

    def push(self, batch: Batch, *, layer: int, owner: str) -> None:
        """Queue a batch for the layer that needs it (of a window: its first)."""
        self._layers.setdefault(layer, OrderedDict()).setdefault(owner, deque()).append(batch)

    def pop(self) -> Batch | None:
        """Take out the batch that is to go next; None if there is none."""
        if not self._layers:
            return None
        layer = min(self._layers)
        owners = self._layers[layer]
        owner, batches = next(iter(owners.items()))
        batch = batches.popleft()
        owners.move_to_end(owner)
        if not batches:
            self._forget(layer, owner)
        return batch

    def remove(self, owner: str) -> list[Batch]:
        """Take out everything of an owner (an abort): its batches by layer, in their order."""
        gone: list[Batch] = []
        for layer in sorted(self._layers):
            if owner in self._layers[layer]:
                gone += self._layers[layer][owner]
                self._forget(layer, owner)
        return gone

    def _forget(self, layer: int, owner: str) -> None:
        del self._layers[layer][owner]
        if not self._layers[layer]:
            del self._layers[layer]
