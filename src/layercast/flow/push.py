"""The sending side of a push: each layer of each part leaves as soon as it is written.

A push is a save into a peer's memory: the same issuer, over a mover whose copies are a transport's writes. What goes
out with a layer's last byte is a word that it is there, with the digests of what was sent.
Does not know states, tickets, or what a message looks like on the wire.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Protocol

import numpy as np

from layercast.config import Config
from layercast.errors import LayercastError
from layercast.flow.issue import Batch, Issuer, Sent
from layercast.flow.orders import PushOrder
from layercast.move.base import Flight, Mover, MoverOver
from layercast.move.flights import HostFlight, first_error
from layercast.observe.timeline import OFF, SpanKind, Timeline
from layercast.plan.pieces import CopyPlan, Ints, Pieces, Route, route_between
from layercast.spec.groups import Layout
from layercast.transport.base import Peer, Transport, Writes


class PeerMover(MoverOver):
    """Copies into a peer's memory; digests are of our own."""

    def __init__(self, transport: Transport, peer: Peer, mover: Mover, keep: Sequence[object] = ()) -> None:
        super().__init__(mover)
        self._transport = transport
        self._keep = tuple(keep)
        self._peer = peer

    def submit(self, pieces: Pieces, *, after: Sequence[Flight] = (), keep: Sequence[object] = ()) -> Flight:
        """Post `pieces` once every flight in `after` has landed."""
        flight = HostFlight()

        def post() -> None:
            error = first_error(after)
            if error is not None:
                flight.fail(error)
                return
            try:
                ticket = self._transport.post(self._peer, writes_of(pieces), (*self._keep, *keep))
            except LayercastError as refused:  # on whichever thread we are, the flight has to end
                flight.fail(refused)
                return
            ticket.then(lambda end: flight.land() if end.error is None else flight.fail(end.error))

        _when_all(after, post)
        return flight

    def close(self, timeout_s: float) -> None:
        """Nothing: neither the transport nor the local mover is its own."""


def writes_of(pieces: Pieces) -> Writes:
    """Pieces as a transport's writes, strided runs written out row by row."""
    if not pieces.source_stride.any():
        return Writes(pieces.source, pieces.target, pieces.length)
    index: Ints = np.repeat(np.arange(len(pieces), dtype=np.int64), pieces.count)
    row: Ints = np.arange(len(index), dtype=np.int64) - (np.cumsum(pieces.count) - pieces.count)[index]
    return Writes(
        pieces.source[index] + row * pieces.source_stride[index],
        pieces.target[index] + row * pieces.target_stride[index],
        pieces.length[index],
    )


def _when_all(flights: Sequence[Flight], call: Callable[[], None]) -> None:
    """Call once all have ended, well or not."""
    if flights:
        flights[0].then(lambda _: _when_all(flights[1:], call))
    else:
        call()


class Announcer(Protocol):
    """Who tells the peer. Called on any thread; must not block."""

    def layer_sent(self, order: PushOrder, layer: int, blocks: tuple[int, ...], digests: bytes) -> None:
        """A layer of a part is in the peer's memory; `digests` (uint64) of its `blocks`, empty if not taken."""
        ...

    def push_failed(self, error: BaseException) -> None:
        """A copy failed."""
        ...

    def push_quiet(self) -> None:
        """The push was stopped, and none of its copies is under way any more."""
        ...


class PushRun:
    """One push under way: orders in, batches out. Orders come from the engine's thread, ends from any."""

    kind: ClassVar[SpanKind] = SpanKind.PUSH

    def __init__(
        self,
        transfer: str,
        ways: tuple[Layout, tuple[Route, ...]],
        mover: PeerMover,
        announcer: Announcer,
        config: Config,
        timeline: Timeline = OFF,
    ) -> None:
        self._transfer = transfer
        self._ways = ways
        self._mover = mover
        self._announcer = announcer
        self._verify = config.verify
        self._issuer = Issuer(mover, config.layerwise_prefetch_layers, (), timeline)
        self._lock = threading.Lock()
        self._stopped = self._told = False
        self._seen: set[tuple[int, int]] = set()
        self._plans: dict[tuple[int, int], CopyPlan] = {}
        self._sending: dict[Batch, tuple[PushOrder, tuple[int, ...]]] = {}

    def written(self, order: PushOrder, layer: int) -> None:
        """The order's blocks are complete in this layer: send them. A repeat changes nothing. Never blocks."""
        if (order.part, layer) in self._seen:
            return
        self._seen.add((order.part, layer))
        group = self._ways[0].group_of(layer)
        plan = self._plan(order, group)
        if plan is None or not plan.blocks:
            self._announcer.layer_sent(order, layer, (), b"")
            return
        ranges = partial(plan.digest_ranges, read="source", order="target") if self._verify else None
        pieces, after = plan.layer(layer), (self._mover.mark(),)
        batch = Batch(self, self._transfer, (layer,), pieces, ranges, after, pieces.nbytes)
        with self._lock:
            if self._stopped:
                return
            self._sending[batch] = (order, tuple(plan.pairs()[1].tolist()))
        self._issuer.add_saves([batch])

    def stop(self) -> None:
        """Send nothing that is still queued; `push_quiet` follows, at once or when the last copy has ended."""
        with self._lock:
            self._stopped = True
        for batch in self._issuer.drop(self._transfer):
            self._left(batch)
        self._left(None)

    @property
    def quiet(self) -> bool:
        """Whether nothing is queued or being sent, so that the source blocks may be used again."""
        return not self._sending

    def submitted(self, sent: Sequence[Sent], since_s: float) -> None:
        """Nothing waits for it here."""

    def ended(self, over: Sequence[Sent]) -> None:
        """Layers are in the peer's memory, or never will be."""
        for batch, flight, digests in over:
            order, blocks = self._sending[batch]
            self._left(batch)  # before the word goes out: its answer may let others forget this push
            if flight.error is None:
                taken = b"".join(digest.digests.astype("<u8").tobytes() for digest in digests)
                self._announcer.layer_sent(order, batch.layers[0], blocks, taken)
            else:
                self._announcer.push_failed(flight.error)

    def _left(self, batch: Batch | None) -> None:
        """One copy less; the last one after a stop is told, once."""
        with self._lock:
            if batch is not None:
                self._sending.pop(batch, None)
            quiet = self._stopped and not self._sending and not self._told
            self._told |= quiet
        if quiet:
            self._announcer.push_quiet()

    def _plan(self, order: PushOrder, group: int) -> CopyPlan | None:
        key = (order.part, group)
        if key not in self._plans:
            pairs = next((pair for pair in order.pairs if pair.group == group), None)
            if pairs is None:
                return None
            self._plans[key] = self._ways[1][group].plan(pairs.blocks, pairs.remote_blocks)
        return self._plans[key]


def routes_to(engine: Layout, target: Layout) -> tuple[Layout, tuple[Route, ...]]:
    """The engine's layout and the routes from it to a peer's memory, of as many groups. Raises LayoutMismatch."""
    pairs = zip(engine.groups, target.groups, strict=True)
    return engine, tuple(route_between(ours, theirs) for ours, theirs in pairs)
