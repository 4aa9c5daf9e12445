"""What every transport here is made of: regions, a channel a peer, and the checks before anything is queued.

Does not know how a channel carries its bytes, nor how it came to be.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from layercast.errors import BadSetting, PeerLost, Refused
from layercast.transport.base import MAX_MESSAGE, MIN_SECRET, Handler, Peer, Region, Ticket, Transport, Writes
from layercast.transport.regions import Regions


class Channel(Protocol):
    """One connection as this side sends on it. No call blocks."""

    def post(self, writes: Writes, keep: Sequence[object]) -> Ticket:
        """Queue writes."""
        ...

    def notify(self, message: bytes) -> Ticket:
        """Queue a message."""
        ...

    def drop(self) -> None:
        """End the connection by our own will."""
        ...


class ChannelTransport(Transport):
    """A transport whose backend serves, connects and closes; `_channels` holds whom it is connected to."""

    def __init__(self, secret: bytes, max_open_bytes: int) -> None:
        """secret: at least 16 bytes. max_open_bytes: to one peer, posted and not yet settled. Raises BadSetting."""
        if len(secret) < MIN_SECRET:
            raise BadSetting(f"a secret of {len(secret)} bytes: at least {MIN_SECRET} are wanted")
        self.incarnation = secrets.token_hex(16)
        self.max_open_bytes = max_open_bytes
        self._secret = secret
        self._regions = Regions()
        self._channels: Mapping[Peer, Channel] = {}
        self._handler: Handler | None = None
        self._closed = False

    def register(self, address: int, nbytes: int, owner: object, writer: Peer | None) -> Region:
        """Let `writer` write there. Raises Refused where it is empty or overlaps another region."""
        return self._regions.register(address, nbytes, owner, writer)

    def unregister(self, region: Region) -> None:
        """Refuse writes there from now on."""
        self._regions.unregister(region)

    def post(self, peer: Peer, writes: Writes, keep: Sequence[object] = ()) -> Ticket:
        """Write to the peer's memory. Never blocks. Raises Refused for arrays that do not fit together."""
        writes = _checked(writes)
        channel = self._channels.get(peer)
        return _lost() if channel is None else channel.post(writes, keep)

    def notify(self, peer: Peer, message: bytes) -> Ticket:
        """Send a message behind the writes. Never blocks. Raises Refused for one that is too long."""
        if len(message) > MAX_MESSAGE:
            raise Refused(
                f"a message of {len(message)} bytes: at most {MAX_MESSAGE}; write it to registered memory instead"
            )
        channel = self._channels.get(peer)
        return _lost() if channel is None else channel.notify(message)

    def disconnect(self, peer: Peer) -> None:
        """Drop the connection."""
        channel = self._channels.get(peer)
        if channel is not None:
            channel.drop()

    def begin_serving(self, handler: Handler) -> None:
        """Take the handler. Raises Refused the second time, or once closed."""
        if self._handler is not None or self._closed:
            raise Refused("this transport serves already or is closed; make a new one")
        self._handler = handler

    @property
    def handler(self) -> Handler:
        """Who is told; only after `serve`."""
        assert self._handler is not None
        return self._handler

    def refuse_unless_serving(self) -> None:
        """Raises Refused before `serve`, and once closed."""
        if self._handler is None or self._closed:
            raise Refused("a connection needs a handler: serve first, and not after `close`")


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
