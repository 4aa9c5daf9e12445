"""The receiving side of a push: counts what the peer says it wrote, checks it, and lets each layer's flight land.

A layer has landed when every part up to the last one has been announced for it and every digest agrees.
Does not know sockets, tickets or states.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from layercast.errors import Corrupt, LayercastError, Malformed
from layercast.move.base import DigestFlight, Digests, Flight, Mover
from layercast.move.flights import HostFlight
from layercast.plan.pieces import route_between
from layercast.spec.groups import Layout


class Arrival:
    """One push as it lands in our blocks. `blocks`: for each group, the targets that were offered."""

    def __init__(self, layout: Layout, blocks: Sequence[Sequence[int]], mover: Mover) -> None:
        self._layout = layout
        self._blocks = [frozenset(group) for group in blocks]
        self._mover = mover
        self._lock = threading.Lock()
        self._parts: dict[int, set[int]] = {layer: set() for layer in layout.layers}
        self._last: int | None = None
        self._checked: dict[int, int] = dict.fromkeys(layout.layers, 0)
        self._open = set(layout.layers)
        """Layers whose flight has not ended. Who takes one out ends its flight."""
        self.flights: dict[int, HostFlight] = {layer: HostFlight() for layer in layout.layers}
        self.nbytes = 0

    def announced(
        self, layer: int, part: int, last: bool, blocks: Sequence[int], digests: bytes, checked: Callable[[], None]
    ) -> None:
        """The peer says that this layer of this part is in place; `checked` is called once that is known, true or not.

        Raises Malformed for a layer, block or part that can't be. A repeat changes nothing.
        """
        with self._lock:
            self._check(layer, part, last, blocks, digests)
            if part in self._parts[layer]:
                return
            self._parts[layer].add(part)
            if last:
                self._last = part
        group = self._layout.groups[self._layout.group_of(layer)]
        plan = route_between(group, group).plan(blocks, blocks) if blocks else None
        if plan is not None:
            self.nbytes += plan.nbytes((layer,))
        if plan is None or not digests:
            self._count(layer, checked)
            return
        # Rows are in order of our block ids; the peer's are in the order in which it names them.
        order = np.argsort(np.asarray(blocks, np.int64), kind="stable")
        expected = np.frombuffer(digests, "<u8")[order]
        flight = self._mover.digest(plan.digest_ranges(layer, read="target", order="target"))
        flight.then(lambda end: self._compare(layer, flight, expected, end, checked))

    @property
    def landed(self) -> bool:
        """Whether every layer has landed."""
        return all(flight.done and flight.error is None for flight in self.flights.values())

    def fail(self, error: LayercastError) -> None:
        """Nothing more will come: every layer that has not landed fails."""
        with self._lock:
            given_up, self._open = self._open, set()
        for layer in sorted(given_up):
            self.flights[layer].fail(error)

    def _check(self, layer: int, part: int, last: bool, blocks: Sequence[int], digests: bytes) -> None:
        if layer not in self._parts:
            raise Malformed(f"layer {layer} of a push: we hold layers {sorted(self._parts)}")
        if part < 0 or (self._last is not None and (part > self._last or (last and part != self._last))):
            raise Malformed(f"part {part} of a push whose last part is {self._last}")
        offered = self._blocks[self._layout.group_of(layer)]
        if not offered.issuperset(blocks) or len(set(blocks)) != len(blocks):
            raise Malformed(f"layer {layer} of a push names blocks that were not offered, or one twice")
        if digests and len(digests) != 8 * len(blocks):
            raise Malformed(f"layer {layer} of a push: {len(digests)} bytes of digests for {len(blocks)} blocks")

    def _compare(
        self,
        layer: int,
        flight: DigestFlight,
        expected: Digests,
        end: Flight,
        checked: Callable[[], None],
    ) -> None:
        if end.error is not None:
            self.fail(Corrupt(f"layer {layer} could not be checked: {end.error}"))
            checked()
        elif not np.array_equal(flight.digests, expected):
            bad = int((flight.digests != expected).sum())
            self.fail(Corrupt(f"layer {layer}: {bad} blocks differ from what the peer sent; recompute the request"))
            checked()
        else:
            self._count(layer, checked)

    def _count(self, layer: int, checked: Callable[[], None]) -> None:
        with self._lock:
            self._checked[layer] += 1
            complete = self._last is not None and self._checked[layer] == self._last + 1 and layer in self._open
            if complete:
                self._open.remove(layer)
        if complete:
            self.flights[layer].land()
        checked()
