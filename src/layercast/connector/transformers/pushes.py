"""The engine's side of pushes: blocks on offer, blocks being sent, and who holds them until the peer is done.

A prefill engine runs all tokens of a prompt but the last and sends every block; a decode engine offers its blocks, then
runs the last token while the layers still land. Does not know tensors, how tickets travel, or what a peer is.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from layercast.connector.transformers.requests import Request
from layercast.connector.transformers.space import BlockSpace
from layercast.control.messages import PushTicket
from layercast.control.push_node import PushNode
from layercast.control.push_states import LIVE, PushState
from layercast.errors import LayercastError, Refused
from layercast.flow.orders import BlockPairs, PushOrder, RemotePairs
from layercast.spec.groups import GroupKind


@dataclass(slots=True)
class _Outgoing:
    """A push that leaves: the ticket, how many tokens' blocks have been ordered, and the parts that are held."""

    ticket: PushTicket
    sent: int = 0
    parts: list[str] = field(default_factory=list)


class PushDesk:
    """Pushes of one engine, both ways. Without a node nothing can be offered or sent."""

    def __init__(self, space: BlockSpace) -> None:
        self.node: PushNode | None = None
        self._space = space
        self._incoming: dict[str, str] = {}
        """Transfer to its request, empty once nothing of it is wanted, until the peer has let go of our blocks."""
        self._outgoing: dict[str, _Outgoing] = {}
        """Request to its push, until it has ended."""
        self._ended: list[tuple[str, str]] = []

    @property
    def pending(self) -> int:
        """Pushes that have not ended on this side."""
        return len(self._incoming) + len(self._outgoing)

    def offer(self, request: Request) -> PushTicket:
        """Offer the request's blocks for all of its tokens but the last."""
        tokens = len(request.tokens) - 1
        blocks = []
        for index, spec in enumerate(self._space.specs):
            if spec.kind is GroupKind.RECURRENT:
                entries: Sequence[int | None] = [request.tables.state]
            else:
                entries = request.tables.groups[index][: math.ceil(tokens / spec.block_size)]
            blocks.append([-1 if entry is None else entry for entry in entries])
        node = self._joined()
        ticket = node.target.offer(request.id, tokens, blocks)
        held = [BlockPairs(g, (), tuple(b for b in named if b >= 0)) for g, named in enumerate(ticket.blocks)]
        self._space.hold(_held(ticket.transfer), held, lasting=True)
        self._incoming[ticket.transfer] = request.id
        request.transfer = ticket.transfer
        request.arriving = node.target.push(ticket.transfer).arrival.flights[min(ticket.layout.layers)]
        return ticket

    def accept(self, request: Request, ticket: PushTicket) -> None:
        """Take a ticket for a request: connect to the peer. Raises Refused, LayoutMismatch, PeerLost."""
        if ticket.tokens != len(request.tokens) - 1:
            raise Refused(
                f"{ticket.transfer} asks for {ticket.tokens} tokens, the prompt has {len(request.tokens)}: "
                "a push brings all but the last"
            )
        self._joined().source.accept(ticket)
        self._outgoing[request.id] = _Outgoing(ticket)

    def order(self, request: Request, after: int) -> PushOrder | None:
        """The part of a request's push that a forward up to `after` tokens completes; its blocks are held."""
        push = self._outgoing.get(request.id)
        if push is None:
            return None
        last = after == push.ticket.tokens
        pairs = tuple(
            pair for index in range(len(self._space.specs)) if (pair := self._pairs(request, push, index, after))
        )
        if not pairs and not last:
            return None
        order = PushOrder(push.ticket.transfer, request.id, len(push.parts), after, pairs, last)
        held = f"{order.transfer} part {order.part}"
        self._space.hold(held, [BlockPairs(pair.group, (), pair.blocks) for pair in pairs], lasting=True)
        push.parts.append(held)
        push.sent = after
        return order

    def _pairs(self, request: Request, push: _Outgoing, index: int, after: int) -> RemotePairs | None:
        """Blocks of one group that end in (sent, after], at the push's end its partial one too, or its state."""
        spec, remote = self._space.specs[index], push.ticket.blocks[index]
        last = after == push.ticket.tokens
        if spec.kind is GroupKind.RECURRENT:
            state = request.tables.state
            return RemotePairs(index, (state,), remote) if last and state is not None and remote[0] >= 0 else None
        end = math.ceil(after / spec.block_size) if last else after // spec.block_size
        table = request.tables.groups[index]
        chosen = [
            (block, remote[at])
            for at in range(push.sent // spec.block_size, end)
            if (block := table[at]) is not None and remote[at] >= 0
        ]
        return RemotePairs(index, *zip(*chosen, strict=True)) if chosen else None

    def landed(self, request: Request) -> None:
        """The forward over a request's received blocks is over, well or not: nothing more of its push is wanted."""
        transfer, node = request.transfer, self.node
        if transfer is None or node is None:
            return
        if node.target.push(transfer).state in LIVE:
            node.target.cancel(transfer, "the request needs no more of it")
        self._incoming[transfer] = ""
        self._let_go(transfer, node)
        request.transfer = request.arriving = None

    def abandon(self, request: Request, reason: str = "the request was aborted") -> None:
        """The request has ended early, or has to start over: give its pushes up."""
        self.landed(request)
        push = self._outgoing.get(request.id)
        if push is not None:
            self._joined().source.cancel(push.ticket.transfer, reason)

    def ended(self) -> list[tuple[str, str]]:
        """(request, why it was not delivered or "") of the outgoing pushes that have ended since the last call."""
        self.settle()
        ended, self._ended = self._ended, []
        return ended

    def settle(self) -> None:
        """Let go of the blocks of pushes that have ended."""
        if self.node is None:
            return
        self.node.expire()
        for transfer in list(self._incoming):
            self._let_go(transfer, self.node)
        for request, push in list(self._outgoing.items()):
            stand = self.node.source.push(push.ticket.transfer)
            if stand.state in LIVE or not stand.quiet:
                continue
            for part in push.parts:
                self._space.ended(part)
            self.node.source.forget(push.ticket.transfer)
            del self._outgoing[request]
            landed = stand.state is PushState.LANDED
            self._ended.append((request, "" if landed else f"the push is {stand.state}: {stand.reason}"))

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for some push to end."""
        node = self._joined()
        pushes = [node.source.push(push.ticket.transfer) for push in self._outgoing.values()]
        for push in [*pushes, *(node.target.push(transfer) for transfer in self._incoming)][:1]:
            push.over.wait(timeout_s)

    def _let_go(self, transfer: str, node: PushNode) -> None:
        """Of an incoming push that the peer has let go of; one that nobody wants any more is forgotten then."""
        if node.target.push(transfer).quiet:
            self._space.ended(_held(transfer))
            if not self._incoming[transfer]:
                node.target.forget(transfer)
                del self._incoming[transfer]

    def _joined(self) -> PushNode:
        if self.node is None:
            raise Refused("this engine has no transport, so nothing can be pushed: open it with one")
        return self.node


def _held(transfer: str) -> str:
    """What holds a push's blocks: not the order that a forward received it by, which ends before the peer lets go."""
    return f"{transfer} on offer"


def wait_for_first_layer(request: Request, timeout_s: float) -> None:
    """Wait up to `timeout_s` until a request's first layer has arrived, or never will."""
    with suppress(LayercastError):
        if request.arriving is not None:
            request.arriving.wait(timeout_s)
