"""The prefill side of pushes: tickets taken, and each layer sent as it is written.

Methods belong to the engine's thread; `handle` and `lost` to the transport's. Does not know how a ticket travels.
"""

import math
from dataclasses import dataclass, field

import msgspec

from layercast.control.messages import Aborted, Confirmed, LayerDone, PushTicket, Taken, encode
from layercast.control.push_states import LIVE, PushEvent
from layercast.control.pushes import Engine, Push, Pushes
from layercast.errors import LayoutMismatch, Malformed, PeerLost, Refused
from layercast.flow.orders import PushOrder
from layercast.flow.push import PeerMover, PushRun, routes_to
from layercast.spec.groups import GroupKind
from layercast.transport.base import Peer

CONNECT_S = 5.0
"""Longest wait for a peer to answer a connection: the engine's thread stands still meanwhile."""


@dataclass(eq=False)
class Outgoing(Push):
    """A push that leaves here; its run tells it what has been sent. `left`: layers of the last part that have not."""

    peer: Peer = field(kw_only=True)
    source: "PushSource" = field(kw_only=True)
    run: PushRun = field(init=False)
    left: int = field(kw_only=True)

    def layer_sent(self, order: PushOrder, layer: int, blocks: tuple[int, ...], digests: bytes) -> None:
        """A layer of a part is in the peer's memory."""
        self.source.sent(self, LayerDone(self.transfer, self.epoch, layer, order.last, blocks, digests))

    def push_failed(self, error: BaseException) -> None:
        """A copy failed."""
        self.source.failed(self, error)

    def push_quiet(self) -> None:
        """A stopped push touches our blocks no more."""
        self.source.quiet(self)


class PushSource(Pushes[Outgoing]):
    """Pushes under way to decode instances (see `flow.worker.Outbound`)."""

    def accept(self, ticket: PushTicket) -> None:
        """Take a ticket: connect, and be ready to send.

        Raises LayoutMismatch naming the first field in which the two sides' KV differs, Refused for a ticket that
        can't be or was taken here already, PeerLost, DeadlineExceeded.
        """
        engine = self._engine
        _check_identities(ticket, engine)
        _check_ticket(ticket)
        if ticket.transfer in self._pushes:
            raise Refused(f"{ticket.transfer} was taken already: a ticket is good for one push; ask for a new one")
        routes = routes_to(engine.layout, ticket.layout)
        life_s = min(ticket.timeout_s, engine.config.push_timeout_s)
        deadline = engine.clock() + life_s
        peer = self._transport.connect(ticket.address, min(life_s, CONNECT_S))
        layers = len(engine.layout.layers)
        push = Outgoing(ticket.transfer, ticket.epoch, deadline, peer=peer, source=self, left=layers)
        mover = PeerMover(self._transport, peer, engine.mover)
        config = msgspec.structs.replace(engine.config, verify=ticket.verify)
        push.run = PushRun(ticket.transfer, routes, mover, push, config, engine.timeline)
        with self._lock:
            self._pushes[ticket.transfer] = push
        self._tell(push, Taken(ticket.transfer, ticket.epoch))

    def written(self, order: PushOrder, layer: int) -> None:
        """The order's blocks are complete in this layer: send them. Never blocks."""
        push = self._pushes.get(order.transfer)
        if push is not None and push.state in LIVE:
            push.run.written(order, layer)

    def cancel(self, transfer: str, reason: str) -> None:
        """Give a push up; the peer is told once nothing of it is under way."""
        with self._lock:
            self._end(self.push(transfer), PushEvent.ABORT, reason)

    def forget(self, transfer: str) -> None:
        """Drop an ended, quiet push and its connection. Raises Missing, BadTransition."""
        peer = self.push(transfer).peer
        super().forget(transfer)
        self._transport.disconnect(peer)

    def handle(self, peer: Peer, message: Confirmed | Aborted) -> None:
        """A message from a decode instance. Raises Malformed for what can't be about a push of ours."""
        with self._lock:
            push = self._pushes.get(message.transfer)
            if push is None or push.epoch != message.epoch:
                return  # late: it speaks of an attempt that has gone
            if isinstance(message, Aborted):
                if push.peer == peer:
                    self._end(push, PushEvent.ABORT, message.reason)
            elif push.peer != peer:
                raise Malformed(f"{push.transfer} goes to another peer")
            elif push.state in LIVE:
                push.see(PushEvent.CONFIRM)
                push.hush()

    # ---- what runs report, on any thread ----

    def sent(self, push: Outgoing, message: LayerDone) -> None:
        """A layer of a part is in the peer's memory: say so."""
        with self._lock:
            if push.state not in LIVE:
                return
            push.see(PushEvent.LAYER)
            push.left -= message.last
            if push.left == 0:
                push.see(PushEvent.COMPLETE)
            self._tell(push, message)

    def failed(self, push: Outgoing, error: BaseException) -> None:
        """A copy failed: the peer can't get a whole push any more."""
        with self._lock:
            self._end(push, PushEvent.LOSE if isinstance(error, PeerLost) else PushEvent.ABORT, str(error))

    def quiet(self, push: Outgoing) -> None:
        """A stopped push touches our blocks no more: what the peer offered is its own again."""
        told = self._transport.notify(push.peer, encode(Aborted(push.transfer, push.epoch, push.reason)))
        told.then(lambda _: push.hush())  # not before the word is out: who sees a quiet push may drop its connection

    def _tell(self, push: Outgoing, message: Taken | LayerDone) -> None:
        """Say it; a push of which a word gets lost can't land any more."""
        try:
            told = self._transport.notify(push.peer, encode(message))
            told.then(lambda end: None if end.error is None else self.failed(push, end.error))
        except Refused as error:
            self.failed(push, error)

    def _end(self, push: Outgoing, event: PushEvent, reason: str) -> None:
        if push.see(event, reason):
            push.run.stop()


def _check_identities(ticket: PushTicket, engine: Engine) -> None:
    if len(ticket.identities) != len(engine.identities):
        raise LayoutMismatch(
            f"{ticket.transfer}: the decode instance has {len(ticket.identities)} groups, this one "
            f"{len(engine.identities)}; serve the same model on both sides"
        )
    for theirs, ours in zip(ticket.identities, engine.identities, strict=True):
        fields = ours.differences(theirs)
        if fields:
            raise LayoutMismatch(
                f"{ticket.transfer}: KV of the two sides differs in {', '.join(fields)} "
                f"({', '.join(f'{getattr(ours, name)!r} / {getattr(theirs, name)!r}' for name in fields)})"
            )


def _check_ticket(ticket: PushTicket) -> None:
    """Raises Refused for what no engine can have offered: tickets come by way of others."""
    if not ticket.timeout_s > 0 or ticket.tokens < 1:
        raise Refused(f"{ticket.transfer}: a ticket for {ticket.tokens} tokens and {ticket.timeout_s} s can't be met")
    if not len(ticket.blocks) == len(ticket.layout.groups) == len(ticket.identities):
        raise LayoutMismatch(
            f"{ticket.transfer}: blocks of {len(ticket.blocks)} groups, {len(ticket.layout.groups)} in its layout"
        )
    for group, blocks in zip(ticket.layout.groups, ticket.blocks, strict=True):
        spec = group.spec
        count = 1 if spec.kind is GroupKind.RECURRENT else math.ceil(ticket.tokens / spec.block_size)
        wanted = [block for block in blocks if block != -1]
        if len(blocks) != count or len(set(wanted)) != len(wanted) or not set(wanted) <= set(range(group.blocks)):
            raise Refused(
                f"{ticket.transfer}: group {spec.name!r} offers blocks {blocks[:8]}...; {count} different ones in "
                f"0..{group.blocks - 1} are wanted for {ticket.tokens} tokens, or -1"
            )
