"""Two sides that push to one another, with oracle bytes for KV; and a stranger who knows the secret."""

import socket
import time
from contextlib import contextmanager

from layercast.config import Config
from layercast.control.messages import encode
from layercast.control.push_node import PushNode
from layercast.control.pushes import Engine
from layercast.flow.orders import PushOrder, RemotePairs
from layercast.move.cpu import CpuMover
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.spec.identities import identities_of
from layercast.testing.clock import FakeClock
from layercast.testing.oracle import ByteEngine
from layercast.transport.socket import SocketTransport
from layercast.transport.wire import Message, encoded, greet

LAYERS, BLOCK = 4, 4
SECRET = b"a secret of sixteen bytes"
SPECS = [
    GroupSpec("full", GroupKind.FULL, BLOCK, (0, 2)),
    GroupSpec("window", GroupKind.WINDOW, BLOCK, (1, 3), window=6),
]
TOKENS = list(range(50, 50 + 6 * BLOCK))
OURS, THEIRS = [9, 3, 4, 5, 12, 1], [2, 7, 8, 6, 15, 14]


class Side:
    def __init__(self, transport, clock, **settings):
        self.bytes = ByteEngine(SPECS, 20)
        self.mover = CpuMover()
        layout = self.bytes.layout
        engine = Engine(layout, identities_of(layout, model="m"), self.mover, Config(**settings), clock)
        self.transport = transport
        self.node = PushNode(engine, transport)

    def close(self):
        self.node.close(5)
        self.mover.close(5)


@contextmanager
def sides(**settings):
    clock = FakeClock()
    prefill, decode = (Side(SocketTransport(SECRET), clock, **settings) for _ in range(2))
    try:
        yield prefill, decode, clock
    finally:
        prefill.close()
        decode.close()


def pairs(first, last, ours, theirs):
    return tuple(RemotePairs(g, tuple(ours[first:last]), tuple(theirs[first:last])) for g in range(2))


def order_of(ticket, number=0, first=0, last=6, done=True, ours=OURS):
    return PushOrder(ticket.transfer, "r", number, last * BLOCK, pairs(first, last, ours, ticket.blocks[0]), done)


def send(prefill, ticket, ours=OURS, parts=((0, 2), (2, 6)), stop_before=None):
    prefill.node.source.accept(ticket)
    for number, (first, last) in enumerate(parts):
        order = order_of(ticket, number, first, last, number == len(parts) - 1, ours)
        for layer in range(LAYERS):
            if (number, layer) == stop_before:
                return
            for block in range(first, last):
                prefill.bytes.write(layer, ours[block], TOKENS[: (block + 1) * BLOCK])
            prefill.node.source.written(order, layer)
            prefill.node.source.written(order, layer)


@contextmanager
def stranger(address):
    """A raw connection of somebody who has proved the secret, and answers nothing."""
    with socket.create_connection((address.host, address.port), 5) as sock:
        greet(sock, SECRET, "f" * 32, calling=True, deadline=time.monotonic() + 5)
        sock.settimeout(5)
        yield sock


def say(sock, message):
    sock.sendall(encoded(Message(encode(message))))


def until(holds, timeout_s=5.0):
    """Wait for a thread of the other side; the condition is re-read until it holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.002)
