"""Frames on a stream, and the greeting that opens it.

A frame is four bytes of header length (little-endian), a msgpack header, and for writes the bytes themselves. A length
is checked before memory is taken for it. Does not know regions, tickets or threads.
"""

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from layercast.errors import DeadlineExceeded, Malformed, PeerLost
from layercast.transport.base import MAX_MESSAGE, Ints

VERSION = 1
MAX_HEADER = MAX_MESSAGE + 1024
MAX_GREETING = 256
"""Most header bytes taken from someone who has proved nothing yet."""
MAX_PIECES = 8192
"""Pieces of one frame: 128 KiB of header."""
_IOV_MAX = 1024


class Hello(msgspec.Struct, frozen=True, tag="h", array_like=True, forbid_unknown_fields=True):
    """First frame of both sides."""

    version: int
    incarnation: str
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag="p", array_like=True, forbid_unknown_fields=True):
    """Second frame of both sides: that they know the secret, bound to both nonces and incarnations."""

    mac: bytes


class Write(msgspec.Struct, frozen=True, tag="w", array_like=True, forbid_unknown_fields=True):
    """Bytes follow for these ranges of the receiver: int64 addresses and lengths, little-endian."""

    addresses: bytes
    lengths: bytes


class Message(msgspec.Struct, frozen=True, tag="m", array_like=True, forbid_unknown_fields=True):
    """Something for the handler."""

    body: bytes


class Ack(msgspec.Struct, frozen=True, tag="a", array_like=True, forbid_unknown_fields=True):
    """So many more of the sender's writes and messages are done with."""

    count: int


Kind = TypeVar("Kind")
Greeting = Hello | Proof
Frame = Write | Message | Ack
_encoder = msgspec.msgpack.Encoder()
_greetings: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_frames: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encoded(frame: Greeting | Frame) -> bytes:
    """The frame with its length in front."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(4, "little") + body


def write_header(remote: Ints, length: Ints) -> bytes:
    """The encoded header of a write."""
    return encoded(Write(remote.astype("<i8").tobytes(), length.astype("<i8").tobytes()))


def ranges_of(write: Write) -> tuple[Ints, Ints]:
    """(addresses, lengths) of a write. Raises Malformed."""
    if len(write.addresses) != len(write.lengths) or len(write.addresses) % 8 or len(write.addresses) > 8 * MAX_PIECES:
        raise Malformed(f"a write of {len(write.addresses)} / {len(write.lengths)} bytes of ranges")
    return (
        np.frombuffer(write.addresses, "<i8").astype(np.int64),
        np.frombuffer(write.lengths, "<i8").astype(np.int64),
    )


def read_frame(sock: socket.socket) -> Frame:
    """The next frame's header. Raises Malformed, PeerLost at the stream's end, OSError."""
    return _decode(_frames, _read_header(sock, MAX_HEADER))


def fill(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Read straight into the buffers until all are full. Raises PeerLost at the stream's end, OSError."""
    left = list(buffers)
    at = 0
    while at < len(left):
        got = sock.recvmsg_into(left[at : at + _IOV_MAX], 0, socket.MSG_WAITALL)[0]
        if got == 0:
            raise PeerLost("the peer closed the connection; if it is still there, its log says why")
        at = _skip(left, at, got)


def send(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send all bytes of the buffers, in order. Raises OSError."""
    left = list(buffers)
    at = 0
    while at < len(left):
        at = _skip(left, at, sock.sendmsg(left[at : at + _IOV_MAX]))


def chunks(buffers: Sequence[memoryview], most: int) -> Iterator[list[memoryview]]:
    """The same bytes in order, in lists of exactly `most` bytes; the last may be shorter."""
    part: list[memoryview] = []
    room = most
    for buffer in buffers:
        left = buffer
        while left:
            part.append(left[:room])
            room -= len(part[-1])
            left = left[len(part[-1]) :]
            if room == 0:
                yield part
                part, room = [], most
    if part:
        yield part


def shut(sock: socket.socket) -> None:
    """Wake whoever is blocked on a socket; one that is gone already changes nothing."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def greet(
    sock: socket.socket,
    secret: bytes,
    incarnation: str,
    *,
    calling: bool,
    deadline: float,
    proved: Callable[[], None] = lambda: None,
) -> str:
    """Prove the secret to each other; the other side's incarnation. The caller proves first.

    deadline: in seconds of time.monotonic. proved: called once the other side has proved it; a caller learns that its
    greeting is over only later. Raises PeerLost, Malformed, DeadlineExceeded.
    """
    mine = Hello(VERSION, incarnation, secrets.token_bytes(32))
    try:
        _send_by(sock, mine, deadline)
        theirs = _decode(_greetings, _read_header(sock, MAX_GREETING, deadline))
        if not isinstance(theirs, Hello) or len(theirs.nonce) != 32:
            raise Malformed("a stream that does not begin with a greeting")
        if theirs.version != VERSION:
            raise PeerLost(f"the peer speaks version {theirs.version}, we {VERSION}; run one release on both sides")
        first, second = (mine, theirs) if calling else (theirs, mine)
        transcript = _encoder.encode((first, second))
        if calling:
            _send_by(sock, Proof(_mac(secret, b"caller", transcript)), deadline)
        proof = _decode(_greetings, _read_header(sock, MAX_GREETING, deadline))
        expected = _mac(secret, b"listener" if calling else b"caller", transcript)
        if not isinstance(proof, Proof) or not hmac.compare_digest(proof.mac, expected):
            raise PeerLost("the other side proved another secret; give both sides the same one")
        proved()
        if not calling:
            _send_by(sock, Proof(_mac(secret, b"listener", transcript)), deadline)
    except TimeoutError as error:
        raise DeadlineExceeded("the other side did not finish its greeting in time") from error
    except OSError as error:
        raise PeerLost(f"the connection broke during the greeting: {error}") from error
    return theirs.incarnation


def _mac(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + transcript, "sha256")


def _send_by(sock: socket.socket, frame: Greeting, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(encoded(frame))


def _read_header(sock: socket.socket, most: int, deadline: float | None = None) -> bytes:
    """The bytes of one header, at most `most`."""
    size = int.from_bytes(_read(sock, 4, deadline), "little")
    if not 0 < size <= most:
        raise Malformed(f"a header of {size} bytes: at most {most} are taken")
    return _read(sock, size, deadline)


def _read(sock: socket.socket, nbytes: int, deadline: float | None) -> bytes:
    """Exactly that many bytes."""
    buffer = bytearray(nbytes)
    view = memoryview(buffer)
    if deadline is None:
        fill(sock, [view])
        return bytes(buffer)
    while view:
        sock.settimeout(_left(deadline))  # anew for each part: a trickle of bytes must not stretch the deadline
        got = sock.recv_into(view)
        if got == 0:
            raise PeerLost(
                "the other side hung up during the greeting: its log says why; most often the secrets differ"
            )
        view = view[got:]
    return bytes(buffer)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _decode(decoder: "msgspec.msgpack.Decoder[Kind]", body: bytes) -> Kind:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise Malformed(f"a header that is none of ours: {error}") from error


def _skip(buffers: list[memoryview], at: int, nbytes: int) -> int:
    """The index of the first buffer that is not done after `nbytes` more; that buffer is cut to what is left."""
    while at < len(buffers) and nbytes >= len(buffers[at]):
        nbytes -= len(buffers[at])
        at += 1
    if nbytes:
        buffers[at] = buffers[at][nbytes:]
    return at
