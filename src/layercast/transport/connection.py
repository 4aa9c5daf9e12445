"""One authenticated connection: a thread that sends what is queued and a thread that receives.

Bytes of writes go from and to memory directly; the queue holds references only. Does not know how the connection came
to be, nor other peers.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from layercast.errors import DeadlineExceeded, Malformed, PeerLost
from layercast.link import Link
from layercast.transport.base import Handler, Ints, Peer, Ticket, Writes
from layercast.transport.ledger import Ledger
from layercast.transport.regions import Regions, views
from layercast.transport.wire import (
    MAX_PIECES,
    Ack,
    Frame,
    Message,
    Write,
    chunks,
    encoded,
    fill,
    ranges_of,
    read_frame,
    send,
    shut,
    write_header,
)

_log = logging.getLogger("layercast.transport")


@dataclass(frozen=True, slots=True)
class _Outgoing:
    header: bytes
    local: Ints | None = None
    length: Ints | None = None
    keep: tuple[object, ...] = ()
    posted_at: float = field(default_factory=time.monotonic)

    def buffers(self) -> list[memoryview]:
        """What to send, in order."""
        head = memoryview(self.header)
        return [head] if self.local is None or self.length is None else [head, *views(self.local, self.length)]


class Connection:
    """Both directions of one socket, from the greeting to the loss of the peer."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        regions: Regions,
        handler: Handler,
        ledger: Ledger,
        link: Link | None,
    ) -> None:
        self.peer = peer
        self._sock = sock
        self._regions = regions
        self._handler = handler
        self._ledger = ledger
        self._link = link
        self._queue: deque[_Outgoing] = deque()
        self._unacknowledged = 0
        self._threads = [
            threading.Thread(target=work, name=f"layercast-net-{name}-{peer.number}", daemon=True)
            for name, work in (("send", self._send), ("receive", self._receive))
        ]

    @property
    def ended(self) -> bool:
        """Whether both threads have run and ended."""
        return all(thread.ident is not None and not thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Begin to send and receive."""
        for thread in self._threads:
            thread.start()

    def post(self, writes: Writes, keep: Sequence[object]) -> Ticket:
        """Queue writes, as frames of at most MAX_PIECES pieces; the last one's ticket stands for all."""
        parts = [slice(first, first + MAX_PIECES) for first in range(0, len(writes.length), MAX_PIECES)]
        frames = [
            _Outgoing(
                write_header(writes.remote[part], writes.length[part]),
                writes.local[part],
                writes.length[part],
                tuple(keep),
            )
            for part in parts
        ]
        return self._enqueue(frames, writes.nbytes, keep)

    def notify(self, message: bytes) -> Ticket:
        """Queue a message."""
        return self._enqueue([_Outgoing(encoded(Message(message)))], len(message), ())

    def drop(self) -> None:
        """End it by our own will."""
        self._lose(PeerLost("this side dropped the connection"))

    def join(self, deadline: float) -> None:
        """Wait for both threads. Raises DeadlineExceeded at `deadline` (time.monotonic)."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    raise DeadlineExceeded(f"{thread.name} is still busy, perhaps in its handler")

    def _enqueue(self, frames: list[_Outgoing], nbytes: int, keep: Sequence[object]) -> Ticket:
        ticket = Ticket()
        if not frames:
            ticket.land()
            return ticket
        with self._ledger.changed:
            refusal = self._ledger.refusal(nbytes, len(frames))
            if refusal is None:
                for frame in frames[:-1]:
                    self._ledger.open(Ticket(), 0)
                    self._queue.append(frame)
                self._ledger.open(ticket, nbytes, keep)
                self._queue.append(frames[-1])
                self._ledger.changed.notify_all()
        if refusal is not None:
            ticket.fail(refusal)
        return ticket

    def _send(self) -> None:
        try:
            while True:
                with self._ledger.changed:
                    self._ledger.changed.wait_for(lambda: self._queue or self._unacknowledged or self._ledger.error)
                    if self._ledger.error is not None:
                        return
                    acknowledged, self._unacknowledged = self._unacknowledged, 0
                    frame = self._queue.popleft() if self._queue else None
                if acknowledged:
                    send(self._sock, [memoryview(encoded(Ack(acknowledged)))])
                if frame is not None:
                    self._send_frame(frame)
                    del frame
        except OSError as error:
            self._lose(PeerLost(f"the connection broke while sending: {error}"))

    def _send_frame(self, frame: _Outgoing) -> None:
        buffers = frame.buffers()
        if self._link is None:
            send(self._sock, buffers)
            return
        for part in chunks(buffers, self._link.chunk):
            self._link.carry(sum(map(len, part)), frame.posted_at)
            send(self._sock, part)

    def _receive(self) -> None:
        try:
            while self._ledger.error is None:  # what is still in the buffers of a dropped connection is not taken
                self._handle(read_frame(self._sock))
        except Malformed as error:
            if self._lose(error):
                _log.error("dropping %s: %s", self.peer, error)
        except PeerLost as error:
            self._lose(error)
        except OSError as error:
            self._lose(PeerLost(f"the connection broke while receiving: {error}"))
        self._threads[0].join()  # it ends, since the connection is lost and the socket shut down
        self._sock.close()
        cause = self._ledger.cause
        assert cause is not None
        self._tell("the loss", lambda: self._handler.on_lost(self.peer, cause))

    def _handle(self, frame: Frame) -> None:
        if isinstance(frame, Ack):
            if frame.count < 1 or not self._ledger.settle(frame.count):
                raise Malformed(f"{frame.count} frames acknowledged that were not sent")
            return
        if isinstance(frame, Write):
            address, length = ranges_of(frame)
            owners = self._regions.claim(self.peer, address, length)  # before a byte is read; kept alive until all are
            fill(self._sock, views(address, length))
            del owners
        else:
            self._tell("a message", lambda: self._handler.on_message(self.peer, frame.body))
        with self._ledger.changed:
            self._unacknowledged += 1
            self._ledger.changed.notify_all()

    def _lose(self, error: Exception) -> bool:
        """Fail what is open and wake both threads. Only the first error counts; whether this was it."""
        if not self._ledger.lose(error):
            return False
        self._queue.clear()
        shut(self._sock)
        return True

    def _tell(self, what: str, call: Callable[[], None]) -> None:
        """Tell the handler, whose mistake is its own: the thread goes on, and ends well."""
        try:
            call()
        except Exception:  # noqa: BLE001
            _log.exception("the handler raised on %s of %s", what, self.peer)
