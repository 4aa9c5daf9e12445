"""The receiving side of a push: counts what the peer says it wrote, checks it, and lets each layer's flight land.

A layer has landed when its last part has been announced, every block on offer has come, and every digest agrees.
Does not know sockets, tickets or states.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from layercast.errors import Corrupt, LayercastError, Malformed
from layercast.move.base import DigestFlight, Digests, Flight, Mover
from layercast.move.flights import HostFlight
from layercast.plan.pieces import route_between
from layercast.spec.groups import Layout

Checked = Callable[[LayercastError | None], None]
"""Told that a layer of a part is right, or why it is not. Whoever is told of an error gives the whole arrival up."""


class Arrival:
    """One push as it lands in our blocks.

    blocks: for each group, the targets that were offered. verify: whether a layer must come with digests.
    """

    def __init__(self, layout: Layout, blocks: Sequence[Sequence[int]], mover: Mover, verify: bool) -> None:
        self._layout = layout
        self.blocks = [frozenset(group) for group in blocks]
        self._mover = mover
        self._verify = verify
        self._lock = threading.Lock()
        self._came: dict[int, set[int]] = {layer: set() for layer in layout.layers}
        self._whole: set[int] = set()
        """Layers whose last part has been announced."""
        self._checking: Counter[int] = Counter()
        self._open = set(layout.layers)
        """Layers whose flight has not ended. Who takes one out ends its flight."""
        self.flights: dict[int, HostFlight] = {layer: HostFlight() for layer in layout.layers}
        self.landed = False
        """Whether every layer is there and right."""
        self.nbytes = 0

    def announced(self, layer: int, last: bool, blocks: Sequence[int], digests: bytes, checked: Checked) -> None:
        """The peer says that these blocks of the layer are in place; `checked` is called once that is known.

        Raises Malformed for a layer, block or digest that can't be. A repeat changes nothing.
        """
        with self._lock:
            self._check(layer, blocks, digests)
            came, offered = self._came[layer], self.blocks[self._layout.group_of(layer)]
            if layer in self._whole or (blocks and came.issuperset(blocks)):
                return
            if not came.isdisjoint(blocks):
                raise Malformed(f"layer {layer} of a push names some blocks that have come already, and some new ones")
            came.update(blocks)
            if last and came != offered:
                raise Malformed(f"layer {layer} of a push ends without blocks {sorted(offered - came)[:8]}")
            if last:
                self._whole.add(layer)
            self._checking[layer] += 1
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

    def fail(self, error: LayercastError) -> None:
        """Nothing more will come: every layer that has not landed fails."""
        with self._lock:
            given_up, self._open = self._open, set()
        for layer in sorted(given_up):
            self.flights[layer].fail(error)

    def _check(self, layer: int, blocks: Sequence[int], digests: bytes) -> None:
        if layer not in self.flights:
            raise Malformed(f"layer {layer} of a push: we hold layers {sorted(self.flights)}")
        offered = self.blocks[self._layout.group_of(layer)]
        if not offered.issuperset(blocks) or len(set(blocks)) != len(blocks):
            raise Malformed(f"layer {layer} of a push names blocks that were not offered, or one twice")
        if len(digests) != 8 * len(blocks) and (digests or self._verify):
            raise Malformed(f"layer {layer} of a push: {len(digests)} bytes of digests for {len(blocks)} blocks")

    def _compare(
        self,
        layer: int,
        flight: DigestFlight,
        expected: Digests,
        end: Flight,
        checked: Checked,
    ) -> None:
        if end.error is not None:
            checked(Corrupt(f"layer {layer} could not be checked: {end.error}"))
        elif not np.array_equal(flight.digests, expected):
            bad = int((flight.digests != expected).sum())
            checked(Corrupt(f"layer {layer}: {bad} blocks differ from what the peer sent; recompute the request"))
        else:
            self._count(layer, checked)

    def _count(self, layer: int, checked: Checked) -> None:
        with self._lock:
            self._checking[layer] -= 1
            complete = layer in self._whole and not self._checking[layer] and layer in self._open
            if complete:
                self._open.remove(layer)
                self.landed = not self._open
        # The verdict comes before the last flight's end: whoever is let through by it finds a push that has landed.
        checked(None)
        if complete:
            self.flights[layer].land()
