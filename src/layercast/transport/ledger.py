"""The open tickets of one peer: in order, bounded, and all failed together when the peer is lost.

Does not know how bytes reach the peer.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from layercast.errors import Congested, PeerLost
from layercast.transport.base import Ticket


@dataclass(frozen=True, slots=True)
class _Entry:
    ticket: Ticket
    nbytes: int
    keep: tuple[object, ...]


class Ledger:
    """Tickets from posting to acknowledgement. `changed` is its lock, to be shared by the queue beside it."""

    def __init__(self, max_open_bytes: int, max_open: int) -> None:
        self.changed = threading.Condition()
        self.error: PeerLost | None = None
        """What later tickets fail with, once the peer is lost."""
        self.cause: Exception | None = None
        """What the handler is told of that."""
        self._open: deque[_Entry] = deque()
        self._open_bytes = 0
        self._max_open_bytes = max_open_bytes
        self._max_open = max_open

    def refusal(self, nbytes: int, entries: int) -> Exception | None:
        """Why that much can't be opened now; None if it can. Into an empty ledger anything fits. Lock held."""
        if self.error is not None:
            return self.error
        room = self._open_bytes + nbytes <= self._max_open_bytes and len(self._open) + entries <= self._max_open
        if room or not self._open:
            return None
        return Congested(
            f"{self._open_bytes} bytes in {len(self._open)} frames are open to this peer "
            f"(limits {self._max_open_bytes} and {self._max_open}); it is slow or stuck, so wait for a ticket first"
        )

    def open(self, ticket: Ticket, nbytes: int, keep: Sequence[object] = ()) -> None:
        """Append a ticket. Lock held, by whoever queues what it stands for."""
        self._open.append(_Entry(ticket, nbytes, tuple(keep)))
        self._open_bytes += nbytes

    def settle(self, count: int) -> bool:
        """Land the oldest `count` tickets. False if there are not that many (then none lands)."""
        with self.changed:
            if count > len(self._open):
                return False
            ended = [self._open.popleft() for _ in range(count)]
            self._open_bytes -= sum(entry.nbytes for entry in ended)
        for entry in ended:
            entry.ticket.land()
        return True

    def lose(self, cause: Exception) -> bool:
        """Fail every open ticket and refuse later ones. False if that has happened already."""
        error = cause if isinstance(cause, PeerLost) else PeerLost(f"this side dropped the connection: {cause}")
        with self.changed:
            if self.error is not None:
                return False
            self.error, self.cause = error, cause
            ended, self._open, self._open_bytes = self._open, deque(), 0
            self.changed.notify_all()
        for entry in ended:
            entry.ticket.fail(error)
        return True
