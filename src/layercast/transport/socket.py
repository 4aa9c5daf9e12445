"""The transport over TCP: no dependency, no staging copies, closed by default.

Listens on loopback and a free port unless told otherwise. Both sides prove a shared secret before anything else is
read; after that the stream is neither encrypted nor signed, so the network between the two has to be trusted.
Does not know what the bytes mean.
"""

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np

from layercast.errors import BadSetting, DeadlineExceeded, LayercastError, PeerLost, Refused
from layercast.link import Link
from layercast.transport.base import MAX_MESSAGE, MIN_SECRET, Address, Handler, Peer, Region, Ticket, Transport, Writes
from layercast.transport.connection import Connection
from layercast.transport.ledger import Ledger
from layercast.transport.listener import Listener, advertised
from layercast.transport.regions import Regions
from layercast.transport.wire import greet

MAX_OPEN_FRAMES = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A machine that is gone without a word is noticed within half a minute. Options this system lacks are left out."""


class SocketTransport(Transport):
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

        secret: the same on both sides, at least 16 bytes. advertise: what peers are told where it differs from `bind`.
        link_gbps: pace what leaves like a link of that rate. max_open_bytes: bytes to one peer that are posted and not
        yet acknowledged. Raises BadSetting.
        """
        if len(secret) < MIN_SECRET:
            raise BadSetting(f"a secret of {len(secret)} bytes: at least {MIN_SECRET} are wanted")
        self.incarnation = secrets.token_hex(16)
        self._secret = secret
        self.max_open_bytes = max_open_bytes
        self._place = (bind, port, advertised(bind, advertise))
        self._link = None if link_gbps is None else Link(link_gbps)
        self._regions = Regions()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._connections: dict[Peer, Connection] = {}
        self._handler: Handler | None = None
        self._listener: Listener | None = None
        self._closed = False

    def serve(self, handler: Handler) -> Address:
        """Listen and accept. Raises BadSetting where the address can't be bound, Refused the second time."""
        bind, port, advertise = self._place
        with self._lock:
            if self._handler is not None or self._closed:
                raise Refused("this transport serves already or is closed; make a new one")
            self._handler = handler
            self._listener = Listener(bind, port, self._secret, self.incarnation, self._begin)
            return Address("socket", advertise, self._listener.port, self.incarnation)

    def register(self, address: int, nbytes: int, owner: object, writer: Peer | None) -> Region:
        """Let `writer` write there. Raises Refused where it is empty or overlaps another region."""
        return self._regions.register(address, nbytes, owner, writer)

    def unregister(self, region: Region) -> None:
        """Refuse writes there from now on."""
        self._regions.unregister(region)

    def connect(self, address: Address, timeout_s: float) -> Peer:
        """A new connection. Raises PeerLost, DeadlineExceeded, Refused before `serve`."""
        if self._handler is None or self._closed:
            raise Refused("a connection needs a handler: serve first, and not after `close`")
        deadline = time.monotonic() + timeout_s
        try:
            sock = socket.create_connection((address.host, address.port), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"nobody answers at {address.host} port {address.port}") from error
        except OSError as error:
            raise PeerLost(f"nobody listens at {address.host} port {address.port}: {error}") from error
        try:
            incarnation = greet(sock, self._secret, self.incarnation, calling=True, deadline=deadline)
            if address.incarnation != incarnation:
                raise PeerLost(
                    f"the process at {address.host} port {address.port} was restarted since it gave this address; "
                    "drop what is known of it and ask for its new address"
                )
        except LayercastError:
            sock.close()
            raise
        return self._begin(sock, incarnation)

    def post(self, peer: Peer, writes: Writes, keep: Sequence[object] = ()) -> Ticket:
        """Write to the peer's memory. Never blocks. Raises Refused for arrays that do not fit together."""
        writes = _checked(writes)
        connection = self._connections.get(peer)
        return _lost() if connection is None else connection.post(writes, keep)

    def notify(self, peer: Peer, message: bytes) -> Ticket:
        """Send a message behind the writes. Never blocks. Raises Refused for one that is too long."""
        if len(message) > MAX_MESSAGE:
            raise Refused(
                f"a message of {len(message)} bytes: at most {MAX_MESSAGE}; write it to registered memory instead"
            )
        connection = self._connections.get(peer)
        return _lost() if connection is None else connection.notify(message)

    def disconnect(self, peer: Peer) -> None:
        """Drop the connection."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.drop()

    def close(self, timeout_s: float) -> None:
        """Drop every connection, end the threads, give the port back. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            listener = self._listener
            connections = list(self._connections.values())
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
            going = {known: other for known, other in self._connections.items() if not other.ended}
            self._connections = {**going, peer: connection}  # first: the handler may answer as soon as it is started
            connection.start()
        return peer


def _tune(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _checked(writes: Writes) -> Writes:
    """The writes without empty pieces, as contiguous int64 arrays. Raises Refused where they do not fit together."""
    arrays = [np.ascontiguousarray(array, np.int64) for array in (writes.local, writes.remote, writes.length)]
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise Refused(f"writes of {[array.shape for array in arrays]}: three arrays of one length are wanted")
    length = arrays[2]
    if len(length) and min(int(array.min()) for array in arrays) < 0:
        raise Refused("a write has a negative address or length")
    return Writes(*arrays) if length.all() else Writes(*(array[length > 0] for array in arrays))


def _lost() -> Ticket:
    ticket = Ticket()
    ticket.fail(PeerLost("this peer is gone; connect again"))
    return ticket
