"""The decode side of pushes: blocks on offer, and what lands in them.

Methods belong to the engine's thread; `handle` and `lost` to the transport's. Does not know how a ticket travels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex

from layercast.control.messages import Aborted, Confirmed, LayerDone, PushTicket, Taken, encode
from layercast.control.push_states import LIVE, PushEvent, PushState
from layercast.control.pushes import Engine, Push, Pushes
from layercast.control.ranges import block_ranges
from layercast.errors import DeadlineExceeded, LayercastError, Malformed, Missing, PeerLost, Refused
from layercast.flow.orders import ReceiveOrder
from layercast.flow.receive import Arrival
from layercast.move.base import Flight
from layercast.transport.base import Address, Peer, Region, Transport


@dataclass(eq=False)
class Incoming(Push):
    """A push that lands here."""

    arrival: Arrival = field(kw_only=True)
    regions: list[Region] = field(default_factory=list)
    """Memory that is open to `peer`."""


class PushTarget(Pushes[Incoming]):
    """The decode side: blocks on offer, and what lands in them."""

    def __init__(self, engine: Engine, transport: Transport, address: Address) -> None:
        super().__init__(engine, transport)
        self._address = address
        self._epochs = 0

    def offer(self, request: str, tokens: int, blocks: Sequence[Sequence[int]]) -> PushTicket:
        """Offer blocks (of each group; -1 where none is wanted) to whoever computes the request's first `tokens`.

        Nobody may write there before one connection has taken the ticket, and then it alone. Raises Refused where a
        block is on offer already.
        """
        wanted = [[block for block in group if block >= 0] for group in blocks]
        engine = self._engine
        with self._lock:
            self._refuse_twice(wanted)
            self._epochs += 1
            push = Incoming(
                transfer=f"push-{token_hex(8)}",
                epoch=self._epochs,
                deadline=engine.clock() + engine.config.push_timeout_s,
                arrival=Arrival(engine.layout, wanted, engine.mover, engine.config.verify),
            )
            self._pushes[push.transfer] = push
        return PushTicket(
            transfer=push.transfer,
            epoch=push.epoch,
            request=request,
            address=self._address,
            layout=engine.layout,
            blocks=tuple(tuple(group) for group in blocks),
            tokens=tokens,
            identities=engine.identities,
            timeout_s=engine.config.push_timeout_s,
            verify=engine.config.verify,
        )

    def arrivals(self, order: ReceiveOrder) -> Mapping[int, Flight]:
        """For each layer, the flight that lands when the push has arrived in it. Raises Missing."""
        return self.push(order.transfer).arrival.flights

    def arrived(self, order: ReceiveOrder) -> Arrival:
        """What has come of a push. Raises Missing."""
        return self.push(order.transfer).arrival

    def cancel(self, transfer: str, reason: str) -> None:
        """Give a push up. Its blocks are quiet once the peer has answered or is gone; at the deadline it is dropped."""
        with self._lock:
            push = self.push(transfer)
            if push.see(PushEvent.ABORT, reason):
                self._close(push, Missing(f"{transfer} was withdrawn: {reason}"), tell=True)

    def handle(self, peer: Peer, message: Taken | LayerDone | Aborted) -> None:
        """A message from a prefill instance. Raises Malformed for what can't be about a push of ours."""
        with self._lock:
            push = self._pushes.get(message.transfer)
            if push is None or push.epoch != message.epoch or (push.peer is None and push.state not in LIVE):
                if isinstance(message, Taken):
                    over = Aborted(message.transfer, message.epoch, "the offer has ended; ask for a new one")
                    self._transport.notify(peer, encode(over))
                return  # late: it speaks of an attempt that has gone
            if push.peer is None and isinstance(message, Taken):
                self._open(push, peer)
            if isinstance(message, Aborted):
                if push.peer == peer:
                    self._end(push, PushEvent.ABORT, f"the peer gave it up: {message.reason}")
                return
            if push.peer != peer:
                raise Malformed(f"{push.transfer} was taken by another connection, or by none")
            if isinstance(message, Taken) or push.state not in LIVE:
                return
            push.see(PushEvent.LAYER)
        push.arrival.announced(
            message.layer, message.last, message.blocks, message.digests, lambda error: self._checked(push, error)
        )

    def _refuse_twice(self, wanted: Sequence[Sequence[int]]) -> None:
        """Raises Refused where a block belongs to a push that may still be written."""
        for push in self._pushes.values():
            for group, (theirs, ours) in enumerate(zip(push.arrival.blocks, wanted, strict=True)):
                if not push.quiet and not theirs.isdisjoint(ours):
                    both = sorted(theirs.intersection(ours))[:8]
                    raise Refused(f"blocks {both} of group {group} overlap {push.transfer}: wait until it is quiet")

    def _open(self, push: Incoming, peer: Peer) -> None:
        """Let `peer`, who has taken the ticket, write the blocks."""
        push.peer = peer
        for start, length in block_ranges(self._engine.layout, [sorted(group) for group in push.arrival.blocks]):
            push.regions.append(self._transport.register(start, length, self._engine, peer))

    def _end(self, push: Incoming, event: PushEvent, reason: str) -> None:
        late = event is PushEvent.EXPIRE
        if push.see(event, reason):
            self._close(push, (DeadlineExceeded if late else PeerLost)(f"{push.transfer}: {reason}"))
        if not late:
            push.hush()  # the peer writes no more of it

    def _checked(self, push: Incoming, error: LayercastError | None) -> None:
        """A layer of a part has been checked; the last one confirms the push."""
        with self._lock:
            if error is not None:
                if push.see(PushEvent.DIFFER, str(error)):
                    self._close(push, error, tell=True)
            elif push.arrival.landed and push.state is PushState.MOVING:
                push.see(PushEvent.COMPLETE)
                push.see(PushEvent.CONFIRM)
                self._close(push, Missing("landed"))
                push.hush()
                if push.peer is not None:
                    self._transport.notify(push.peer, encode(Confirmed(push.transfer, push.epoch)))

    def _close(self, push: Incoming, error: LayercastError, tell: bool = False) -> None:
        """Take the memory back and let nobody wait for it any more."""
        for region in push.regions:
            self._transport.unregister(region)
        push.regions.clear()
        push.arrival.fail(error)
        if push.peer is None:
            push.hush()
        elif tell:
            self._transport.notify(push.peer, encode(Aborted(push.transfer, push.epoch, push.reason)))
