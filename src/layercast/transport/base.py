"""What a transport must do: write into a peer's memory, and tell it so in order.

Writes are one-sided: the receiving side only registers memory and is told by a message, sent after the writes, that
they are in place. Does not know layers, blocks, requests or what a message says.

Laws (see `testing.TransportLaws`):
- a message is handled after every write posted before it, to the same peer, is in place;
- not one byte is written by a batch that names memory outside the regions open to its connection, which is dropped;
- a ticket lands once the peer's memory holds the bytes (a message's: once it was handled), or fails; never neither;
- posting never blocks: what a slow peer can't take is refused with Congested;
- a peer is one life of one process: restarted on the same port, it is another peer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from layercast.landing import Landing

Ints = npt.NDArray[np.int64]
MAX_MESSAGE = 1 << 20
"""Most bytes of one message."""
MIN_SECRET = 16


class Address(msgspec.Struct, frozen=True):
    """Where a transport can be reached, and which life of it. May be sent to others.

    incarnation: random for each transport made.
    """

    kind: str
    host: str
    port: int
    incarnation: str


class Region(msgspec.Struct, frozen=True):
    """Registered memory of one process: local handle and wire descriptor in one."""

    id: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of one connection. `number` is ours alone; `incarnation` is its own."""

    number: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Writes:
    """Parallel int64 arrays: copy `length` bytes at our address `local` to the peer's address `remote`."""

    local: Ints
    remote: Ints
    length: Ints

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.length.sum())


class Ticket(Landing):
    """The end of one post or message, as its sender sees it."""


class Handler(Protocol):
    """Who is told what arrives. Called on the transport's threads; must not block for long."""

    def on_message(self, peer: Peer, message: bytes) -> None:
        """A message, after all writes that its sender posted before it."""
        ...

    def on_lost(self, peer: Peer, error: Exception) -> None:
        """The connection has ended, whoever ended it. Told once a peer; it writes and says nothing any more."""
        ...


class Transport(ABC):
    """Memory of this process that peers may write into, and the connections to them."""

    @abstractmethod
    def serve(self, handler: Handler) -> Address:
        """Begin to accept peers. Call it once, before `connect`. Returns where we can be reached."""

    @abstractmethod
    def register(self, address: int, nbytes: int, owner: object, writer: Peer | None) -> Region:
        """Let `writer` alone write to [address, address + nbytes); None: whoever knows the secret. Raises Refused.

        `owner` is kept alive meanwhile. The writer is one connection: a later one of the same process is another.
        """

    @abstractmethod
    def unregister(self, region: Region) -> None:
        """Refuse writes there from now on. One that is landing keeps the owner alive until it has ended."""

    @abstractmethod
    def connect(self, address: Address, timeout_s: float) -> Peer:
        """A new connection to the transport there.

        Raises PeerLost when it is not there, proves another secret or is another incarnation; DeadlineExceeded.
        """

    @abstractmethod
    def post(self, peer: Peer, writes: Writes, keep: Sequence[object] = ()) -> Ticket:
        """Write to the peer's memory. Never blocks; `keep` lives until the ticket has ended.

        The ticket fails with PeerLost, or with Congested when too much is open to this peer already.
        """

    @abstractmethod
    def notify(self, peer: Peer, message: bytes) -> Ticket:
        """Send a message, to be handled after the writes posted before it. Fails as `post` does.

        Raises Refused for more than MAX_MESSAGE bytes.
        """

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Drop the connection; its open tickets fail. A peer that is gone changes nothing.

        Its writes may go on landing until `on_lost` is told.
        """

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Drop every connection, end the threads, give the port back. Raises DeadlineExceeded."""
