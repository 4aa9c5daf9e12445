"""One engine process's place among its peers: a transport, the pushes that land here and those that leave.

Does not know requests, schedules or how a ticket travels.
"""

from layercast.control.messages import Aborted, Confirmed, decode
from layercast.control.push_source import PushSource
from layercast.control.push_target import PushTarget
from layercast.control.pushes import Engine
from layercast.errors import BadTransition, Malformed
from layercast.flow.worker import Peers
from layercast.transport.base import Peer, Transport


class PushNode:
    """Both ends of pushes behind one transport; it is the transport's handler."""

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self._engine = engine
        self._transport = transport
        self.address = transport.serve(self)
        self.source = PushSource(engine, transport)
        self.target = PushTarget(engine, transport, self.address)

    @property
    def peers(self) -> Peers:
        """What a worker needs of it."""
        return Peers(outbound=self.source, inbound=self.target)

    def expire(self) -> None:
        """End pushes whose deadline has come; to be called with every step."""
        now = self._engine.clock()
        self.source.expire(now)
        self.target.expire(now)

    def on_message(self, peer: Peer, message: bytes) -> None:
        """Sort a message to its end; a peer that breaks the protocol is dropped."""
        try:
            said = decode(message)
            if not isinstance(said, Confirmed):
                self.target.handle(peer, said)
            if isinstance(said, Confirmed | Aborted):
                self.source.handle(peer, said)
        except (Malformed, BadTransition):
            self._transport.disconnect(peer)  # `on_lost` follows once nothing of it can land any more

    def on_lost(self, peer: Peer, error: Exception) -> None:
        """A peer is gone."""
        self.source.lost(peer)
        self.target.lost(peer)

    def close(self, timeout_s: float) -> None:
        """Give everything up and close the transport. Raises DeadlineExceeded."""
        self.source.close()
        self.target.close()
        self._transport.close(timeout_s)
