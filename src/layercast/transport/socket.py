"""The transport over TCP: no dependency, no staging copies, closed by default.

Listens on loopback and a free port unless told otherwise. Both sides prove a shared secret before anything else is
read; after that the stream is neither encrypted nor signed, so the network between the two has to be trusted.
Does not know what the bytes mean.
"""

import itertools
import socket
import threading
import time

from layercast.errors import DeadlineExceeded, LayercastError, PeerLost
from layercast.transport.base import Address, Handler, Peer
from layercast.transport.channels import ChannelTransport
from layercast.transport.connection import Connection
from layercast.transport.ledger import Ledger
from layercast.transport.link import Link
from layercast.transport.listener import Listener, advertised
from layercast.transport.wire import greet

MAX_OPEN_FRAMES = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A machine that is gone without a word is noticed within half a minute. Options this system lacks are left out."""


class SocketTransport(ChannelTransport):
    """A listener, and one connection a peer. Any thread may call."""

    def __init__(
        self,
        secret: bytes,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        link_gbps: float | None = None,
        max_open_bytes: int = 1 << 30,
    ) -> None:
        """Prepare; `serve` listens.

        secret: the same on both sides. advertise: what peers are told where it differs from `bind`.
        link_gbps: pace what leaves like a link of that rate. max_open_bytes: bytes to one peer that are posted and not
        yet acknowledged. Raises BadSetting.
        """
        super().__init__(secret, max_open_bytes)
        self._place = (bind, port, advertised(bind, advertise))
        self._link = Link(link_gbps)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._channels: dict[Peer, Connection] = {}
        self._listener: Listener | None = None

    def serve(self, handler: Handler) -> Address:
        """Listen and accept. Raises BadSetting where the address can't be bound, Refused the second time."""
        bind, port, advertise = self._place
        with self._lock:
            self.begin_serving(handler)
            self._listener = Listener(bind, port, self._secret, self.incarnation, self._begin)
            return Address("socket", advertise, self._listener.port, self.incarnation)

    def connect(self, address: Address, timeout_s: float) -> Peer:
        """A new connection. Raises PeerLost, DeadlineExceeded, Refused before `serve`."""
        self.refuse_unless_serving()
        deadline = time.monotonic() + timeout_s
        try:
            sock = socket.create_connection((address.host, address.port), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"nobody answers at {address.host} port {address.port}") from error
        except OSError as error:
            raise PeerLost(f"nobody listens at {address.host} port {address.port}: {error}") from error
        try:
            incarnation = greet(sock, self._secret, self.incarnation, calling=True, deadline=deadline)
            if address.incarnation not in ("", incarnation):
                raise PeerLost(
                    f"the process at {address.host} port {address.port} was restarted since it gave this address; "
                    "drop what is known of it and ask for its new address"
                )
        except LayercastError:
            sock.close()
            raise
        return self._begin(sock, incarnation)

    def close(self, timeout_s: float) -> None:
        """Drop every connection, end the threads, give the port back. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            listener = self._listener
            connections = list(self._channels.values())
        for connection in connections:
            connection.drop()
        if listener is not None:
            listener.close(deadline)
        for connection in connections:
            connection.join(deadline)

    def _begin(self, sock: socket.socket, incarnation: str) -> Peer:
        """Start a connection whose greeting is done. Connections that ended are forgotten on the way."""
        try:
            _tune(sock)
        except OSError as error:
            sock.close()
            raise PeerLost(f"the peer was gone as soon as it came: {error}") from error
        with self._lock:
            if self._closed or self._handler is None:
                sock.close()
                raise PeerLost("this transport is closed")
            peer = Peer(next(self._numbers), incarnation)
            ledger = Ledger(self.max_open_bytes, MAX_OPEN_FRAMES)
            connection = Connection(sock, peer, self._regions, self._handler, ledger, self._link)
            going = {known: other for known, other in self._channels.items() if not other.ended}
            self._channels = {**going, peer: connection}  # first: the handler may answer as soon as it is started
            connection.start()
        return peer


def _tune(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
