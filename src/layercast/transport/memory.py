"""The transport inside one process: the reference for what the others have to do.

Does not know sockets or what the bytes mean.
"""

import ctypes
import hmac
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from layercast.errors import DeadlineExceeded, Malformed, PeerLost
from layercast.transport.base import Address, Handler, Peer, Ticket, Writes, tell
from layercast.transport.channels import ChannelTransport
from layercast.transport.ledger import Ledger

_log = logging.getLogger("layercast.transport")


class MemoryHub:
    """Where the transports of one process find one another."""

    def __init__(self) -> None:
        self.transports: dict[int, MemoryTransport] = {}
        self.ports = itertools.count(1)
        self.numbers = itertools.count(1)


class _End:
    """One side's end of a connection: who it is connected to, and its open tickets."""

    def __init__(self, owner: "MemoryTransport", peer: Peer) -> None:
        self.owner = owner
        self.peer = peer
        self.other: _End | None = None
        self.told = owner.handler
        self.ledger = Ledger(owner.max_open_bytes, 4096)

    def post(self, writes: Writes, keep: Sequence[object]) -> Ticket:
        """Write to the peer's memory, on its thread."""

        def write(end: _End) -> None:
            if len(writes.length):
                owners = end.owner._regions.claim(end.peer, writes.remote, writes.length)
                columns = (writes.local.tolist(), writes.remote.tolist(), writes.length.tolist())
                for local, remote, length in zip(*columns, strict=True):
                    ctypes.memmove(remote, local, length)
                del owners

        return self._enqueue(writes.nbytes, keep, write)

    def notify(self, message: bytes) -> Ticket:
        """Tell the peer's handler, on its thread."""

        return self._enqueue(len(message), (), lambda end: tell(end.told, end.peer, message))

    def drop(self) -> None:
        """End it on both sides."""
        _lose(self, PeerLost("this side dropped the connection"))
        _lose(self.other, PeerLost("the peer dropped the connection"))

    def _enqueue(self, nbytes: int, keep: Sequence[object], work: Callable[["_End"], None]) -> Ticket:
        ticket, arrival = Ticket(), self.other
        assert arrival is not None
        with self.ledger.changed:
            refusal = self.ledger.refusal(nbytes)
            if refusal is None:
                self.ledger.open(ticket, nbytes, keep)
                arrival.owner._jobs.put(lambda: arrival.arrive(self, work))
        if refusal is not None:
            ticket.fail(refusal)
        return ticket

    def arrive(self, sender: "_End", work: Callable[["_End"], None]) -> None:
        """On our thread: one write or message of a peer."""
        if self.ledger.error is not None:
            return
        try:
            work(self)
        except Malformed as error:
            _log.error("dropping %s: %s", self.peer, error)
            _lose(self, error)
            _lose(sender, PeerLost("the peer dropped the connection; its log says why"))
        else:
            sender.ledger.settle(1)


class MemoryTransport(ChannelTransport):
    """Peers in one process; each transport's thread writes what arrives and calls its handler."""

    def __init__(self, hub: MemoryHub, secret: bytes, *, max_open_bytes: int = 1 << 30) -> None:
        super().__init__(secret, max_open_bytes)
        self._hub = hub
        self._port = next(hub.ports)
        self._channels: dict[Peer, _End] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="layercast-net-memory", daemon=True)

    def serve(self, handler: Handler) -> Address:
        """Begin to accept peers. Raises Refused the second time."""
        self.begin_serving(handler)
        self._thread.start()
        self._hub.transports[self._port] = self
        return Address("memory", "", self._port, self.incarnation)

    def connect(self, address: Address, timeout_s: float) -> Peer:
        """A new connection. Raises PeerLost, Refused before `serve`."""
        self.refuse_unless_serving()
        other = self._hub.transports.get(address.port)
        if other is None or address.incarnation not in ("", other.incarnation):
            raise PeerLost(f"nobody of that incarnation at port {address.port} of this hub")
        if not hmac.compare_digest(self._secret, other._secret):
            raise PeerLost("the other side has another secret; give both sides the same one")
        mine = _End(self, Peer(next(self._hub.numbers), other.incarnation))
        theirs = _End(other, Peer(next(self._hub.numbers), self.incarnation))
        mine.other, theirs.other = theirs, mine
        self._channels[mine.peer], other._channels[theirs.peer] = mine, theirs
        return mine.peer

    def close(self, timeout_s: float) -> None:
        """Drop every connection and end the thread. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        self._closed = True
        self._hub.transports.pop(self._port, None)
        for peer in list(self._channels):
            self.disconnect(peer)
        if self._handler is not None:
            self._jobs.put(None)
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                raise DeadlineExceeded(f"{self._thread.name} is still busy, perhaps in its handler")


def _lose(end: _End | None, error: Exception) -> None:
    """Tell one end that its peer is gone, on its own thread."""
    if end is None:
        return
    if end.ledger.lose(error):
        end.owner._channels.pop(end.peer, None)
        end.owner._jobs.put(lambda: end.told.on_lost(end.peer, error))


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # noqa: BLE001  one job's trouble is its own
            _log.exception("a job of the memory transport raised")
        del job
