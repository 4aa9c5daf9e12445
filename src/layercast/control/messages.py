"""What two engines say to one another about a push: frozen values, msgpack on the wire, no pickle.

Every message names the transfer and its epoch; one of another epoch is late and ignored. Bytes of KV never travel in a
message. Does not know how messages are carried.
"""

import msgspec

from layercast.errors import Malformed
from layercast.spec.groups import Layout
from layercast.spec.keys import Identity
from layercast.transport.base import Address


class PushTicket(msgspec.Struct, frozen=True):
    """A decode instance's offer: where and for how long a prefill instance may write a request's KV.

    transfer: minted once. epoch: of this attempt. address: of the transport. layout: the target memory, by address.
    blocks: for each group, the target of each block index; -1 where none is wanted. tokens: that the push brings.
    identities: one a group, which both sides must share. verify: whether the receiver compares digests.
    """

    transfer: str
    epoch: int
    request: str
    address: Address
    layout: Layout
    blocks: tuple[tuple[int, ...], ...]
    tokens: int
    identities: tuple[Identity, ...]
    timeout_s: float
    verify: bool


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """Sender to receiver, before the first byte: this connection will write the push, and no other may."""

    transfer: str
    epoch: int


class LayerDone(msgspec.Struct, frozen=True, tag="layer"):
    """The bytes of one layer of one part have been written.

    last: whether it is the last part. blocks: target blocks of the layer's group, in the order of `digests` (uint64,
    little-endian).
    """

    transfer: str
    epoch: int
    layer: int
    last: bool
    blocks: tuple[int, ...]
    digests: bytes


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    """Receiver to sender: everything has landed and is right; the source may go."""

    transfer: str
    epoch: int


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """Either side: this push is over, for that reason."""

    transfer: str
    epoch: int
    reason: str


PushMessage = Taken | LayerDone | Confirmed | Aborted

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PushMessage] = msgspec.msgpack.Decoder(PushMessage)


def encode(message: PushMessage) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes) -> PushMessage:
    """A message from msgpack. Raises Malformed."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Malformed(f"not a message about a push: {error}") from error
