"""What every transport must do, as a test class: subclass it, give it a backend, and pytest runs the laws."""

# ruff: noqa: D102  a law's name says what it holds

import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layercast.errors import BadSetting, Congested, Malformed, PeerLost, Refused
from layercast.testing.memory import SOON_S, HostMemory, Kept
from layercast.transport.base import MAX_MESSAGE, Address, Peer, Ticket, Transport, Writes

SECRET = b"sixteen or more bytes"


def writes_of(*rows: tuple[int, int, int]) -> Writes:
    """Writes from rows of (local address, remote address, length)."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Writes(*(np.ascontiguousarray(column) for column in table.T))


class Recorder:
    """A handler that keeps what it is told, may be held up, and lets others wait for what it was told."""

    def __init__(self) -> None:
        self.messages: list[tuple[Peer, bytes]] = []
        self.lost: list[tuple[Peer, Exception]] = []
        self.on_arrival: Callable[[Peer, bytes], None] = lambda peer, message: None
        self.go = threading.Event()
        self.go.set()
        self._changed = threading.Condition()

    def on_message(self, peer: Peer, message: bytes) -> None:
        """Keep it, after `go` is set."""
        assert self.go.wait(SOON_S)
        self.on_arrival(peer, message)
        with self._changed:
            self.messages.append((peer, message))
            self._changed.notify_all()

    def on_lost(self, peer: Peer, error: Exception) -> None:
        """Keep it."""
        with self._changed:
            self.lost.append((peer, error))
            self._changed.notify_all()

    def wait_for(self, met: "Callable[[Recorder], bool]") -> None:
        """Block until `met(self)`."""
        with self._changed:
            assert self._changed.wait_for(lambda: met(self), SOON_S), (self.messages, self.lost)


class Side:
    """A transport that serves, its handler, its address, and 64 KiB of memory registered with it."""

    SIZE = 1 << 16

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.told = Recorder()
        self.at: Address = transport.serve(self.told)
        self.memory = HostMemory()
        self.base = self.memory.alloc(self.SIZE)
        self.region = transport.register(self.base, self.SIZE, self.memory, None)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the registered memory."""
        return self.memory.read(self.base + offset, nbytes)


def is_dropped_for(sender: Side, peer: Peer, receiver: Side, writes: Writes) -> None:
    """Assert that the receiver drops the connection for these writes, and that the sender's ticket fails."""
    count = len(receiver.told.lost)
    with pytest.raises(PeerLost):
        sender.transport.post(peer, writes).wait(SOON_S)
    receiver.told.wait_for(lambda told: len(told.lost) == count + 1)
    assert isinstance(receiver.told.lost[-1][1], Malformed)


class TransportLaws:
    """Laws of `transport.base.Transport`."""

    def make_transport(self, secret: bytes = SECRET, **limits: int) -> Transport:
        """A new transport that can reach the others of this test. limits: `max_open_bytes`."""
        raise NotImplementedError

    @pytest.fixture
    def make_side(self) -> Iterator[Callable[..., Side]]:
        """Makes sides and closes them; threads and files must be as before then."""
        threads, files = set(threading.enumerate()), open_files()
        sides: list[Side] = []

        def make(secret: bytes = SECRET, **limits: int) -> Side:
            sides.append(Side(self.make_transport(secret, **limits)))
            return sides[-1]

        yield make
        for side in sides:
            side.told.go.set()
            side.transport.close(SOON_S)
        assert set(threading.enumerate()) <= threads
        assert open_files() == files

    @pytest.fixture
    def pair(self, make_side: Callable[..., Side]) -> tuple[Side, Side, Peer]:
        """Two sides, and the first one's peer for the second."""
        ours, theirs = make_side(), make_side()
        return ours, theirs, ours.transport.connect(theirs.at, SOON_S)

    def test_bytes_lie_in_the_peers_memory_once_the_ticket_has_landed(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair
        data = os.urandom(1000)
        ours.memory.write(ours.base, data)
        ours.transport.post(peer, writes_of((ours.base, theirs.base + 77, 1000))).wait(SOON_S)
        assert theirs.read(0, Side.SIZE) == bytes(77) + data + bytes(Side.SIZE - 1077)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(pieces=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(0, 300)), max_size=60))
    def test_any_pieces_put_those_bytes_there_and_no_other(
        self, pair: tuple[Side, Side, Peer], pieces: list[tuple[int, int, int]]
    ) -> None:
        ours, theirs, peer = pair
        data, expected, at = os.urandom(6000), bytearray(Side.SIZE), 0
        rows = []
        for offset, gap, length in pieces:
            at += gap
            rows.append((ours.base + offset, theirs.base + at, length))
            expected[at : at + length] = data[offset : offset + length]
            at += length
        ours.memory.write(ours.base, data)
        theirs.memory.write(theirs.base, bytes(Side.SIZE))
        ours.transport.post(peer, writes_of(*rows)).wait(SOON_S)
        assert theirs.read(0, Side.SIZE) == bytes(expected)

    def test_more_pieces_than_any_frame_holds_arrive_whole(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair
        data = os.urandom(Side.SIZE)
        ours.memory.write(ours.base, data)
        order = np.random.default_rng(0).permutation(Side.SIZE // 3)
        rows = [(ours.base + 3 * int(i), theirs.base + 3 * int(i), 3) for i in order]
        ours.transport.post(peer, writes_of(*rows)).wait(SOON_S)
        assert theirs.read(0, 3 * len(order)) == data[: 3 * len(order)]

    def test_a_message_is_handled_after_the_writes_before_it(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair
        seen: list[bool] = []
        theirs.told.on_arrival = lambda _, message: seen.append(theirs.read(0, 4096) == message * 1024)
        cells = [ours.memory.alloc(4096) for _ in range(200)]
        for i, cell in enumerate(cells):
            # The next round overwrites the same place, so each round waits until its message was handled.
            message = i.to_bytes(4, "little")
            ours.memory.write(cell, message * 1024)
            ours.transport.post(peer, writes_of((cell, theirs.base, 2048), (cell, theirs.base + 2048, 2048)))
            ours.transport.notify(peer, message).wait(SOON_S)
        assert seen == [True] * 200

    def test_messages_are_handled_in_order_both_ways(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair
        theirs.told.on_arrival = lambda back, message: (theirs.transport.notify(back, b"re " + message), None)[1]
        sent = [b"%d" % i for i in range(200)]
        for message in sent:
            ours.transport.notify(peer, message)
        ours.told.wait_for(lambda told: len(told.messages) == 200)
        assert [message for _, message in theirs.told.messages] == sent
        assert ours.told.messages == [(peer, b"re " + message) for message in sent]

    def test_the_largest_message_arrives_and_a_larger_one_is_refused(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair
        ours.transport.notify(peer, bytes(MAX_MESSAGE)).wait(SOON_S)
        assert [len(message) for _, message in theirs.told.messages] == [MAX_MESSAGE]
        with pytest.raises(Refused):
            ours.transport.notify(peer, bytes(MAX_MESSAGE + 1))

    def test_a_handler_that_raises_is_told_the_next_message_too(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair

        def arrive(_peer: Peer, message: bytes) -> None:
            if message == b"bad":
                raise ValueError("a handler's own mistake")

        theirs.told.on_arrival = arrive
        for message in (b"bad", b"good"):
            ours.transport.notify(peer, message).wait(SOON_S)
        assert [message for _, message in theirs.told.messages] == [b"good"]

    def test_writes_outside_the_regions_write_nothing_and_drop_the_connection(
        self, make_side: Callable[..., Side]
    ) -> None:
        ours, theirs = make_side(), make_side()
        other = theirs.memory.alloc(256)
        ours.memory.write(ours.base, b"\xff" * 256)
        inside = (ours.base, theirs.base, 64)
        bad = [
            (theirs.base - 1, 64),
            (theirs.base + Side.SIZE - 63, 64),
            (theirs.base + Side.SIZE, 1),
            (other, 64),
            (1, 64),
            ((1 << 63) - 1, 64),
        ]
        for address, length in bad:
            peer = ours.transport.connect(theirs.at, SOON_S)
            is_dropped_for(ours, peer, theirs, writes_of(inside, (ours.base, address, length)))
        assert theirs.read(0, Side.SIZE) == bytes(Side.SIZE)
        assert theirs.memory.read(other, 256) == bytes(256)
        peer = ours.transport.connect(theirs.at, SOON_S)
        ours.transport.post(peer, writes_of(inside)).wait(SOON_S)

    def test_memory_that_is_unregistered_is_written_no_more(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair
        theirs.transport.unregister(theirs.region)
        theirs.transport.unregister(theirs.region)
        with pytest.raises(PeerLost):
            ours.transport.post(peer, writes_of((ours.base, theirs.base, 8))).wait(SOON_S)

    def test_memory_opened_to_one_connection_is_written_by_no_other(self, make_side: Callable[..., Side]) -> None:
        ours, theirs, third = make_side(), make_side(), make_side()
        peer, other = ours.transport.connect(theirs.at, SOON_S), third.transport.connect(theirs.at, SOON_S)
        ours.transport.notify(peer, b"this one").wait(SOON_S)
        ((writer, _),) = theirs.told.messages
        own = theirs.memory.alloc(64)
        theirs.transport.register(own, 64, theirs.memory, writer)
        for side in (ours, third):
            side.memory.write(side.base, b"\xff" * 64)
        # Neither a peer that knows the secret, nor the same process by another connection.
        for side, link in ((third, other), (ours, ours.transport.connect(theirs.at, SOON_S))):
            is_dropped_for(side, link, theirs, writes_of((side.base, own, 64)))
            assert theirs.memory.read(own, 64) == bytes(64)
        ours.transport.post(peer, writes_of((ours.base, own, 64))).wait(SOON_S)
        assert theirs.memory.read(own, 64) == b"\xff" * 64

    def test_memory_is_registered_once_and_is_not_empty(self, make_side: Callable[..., Side]) -> None:
        side = make_side()
        for address, nbytes in ((side.base, 1), (side.base - 8, 16), (side.base + Side.SIZE + 64, 0), (0, 8)):
            with pytest.raises(Refused):
                side.transport.register(address, nbytes, None, None)

    def test_writes_that_do_not_fit_together_are_refused(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair
        one, two = np.array([ours.base]), np.array([theirs.base, theirs.base])
        with pytest.raises(Refused):
            ours.transport.post(peer, Writes(one, two, one))
        with pytest.raises(Refused):
            ours.transport.post(peer, writes_of((ours.base, theirs.base, -1)))

    def test_another_secret_is_refused(self, make_side: Callable[..., Side]) -> None:
        ours, theirs = make_side(b"quite another secret"), make_side()
        with pytest.raises(PeerLost):
            ours.transport.connect(theirs.at, SOON_S)
        assert theirs.told.messages == []

    def test_a_short_secret_is_refused(self) -> None:
        with pytest.raises(BadSetting):
            self.make_transport(b"short")

    def test_connecting_to_nobody_or_to_an_earlier_life_fails(self, make_side: Callable[..., Side]) -> None:
        ours, theirs = make_side(), make_side()
        earlier = Address(theirs.at.kind, theirs.at.host, theirs.at.port, "another incarnation")
        with pytest.raises(PeerLost):
            ours.transport.connect(earlier, SOON_S)
        assert ours.transport.connect(theirs.at, SOON_S).incarnation == theirs.at.incarnation
        theirs.transport.close(SOON_S)
        with pytest.raises(PeerLost):
            ours.transport.connect(theirs.at, SOON_S)

    def test_connecting_before_serving_is_refused(self, make_side: Callable[..., Side]) -> None:
        theirs, ours = make_side(), self.make_transport()
        with pytest.raises(Refused):
            ours.connect(theirs.at, SOON_S)
        ours.close(SOON_S)

    def test_a_peer_that_goes_fails_every_open_ticket_and_both_are_told_once(
        self, pair: tuple[Side, Side, Peer]
    ) -> None:
        ours, theirs, peer = pair
        theirs.told.go.clear()
        tickets = [ours.transport.notify(peer, b"held up")]
        tickets += [ours.transport.post(peer, writes_of((ours.base, theirs.base, 4096))) for _ in range(20)]
        release = threading.Timer(0.1, theirs.told.go.set)
        release.start()
        theirs.transport.close(SOON_S)
        release.join(SOON_S)
        for ticket in tickets[1:]:
            try:
                ticket.wait(SOON_S)
            except PeerLost:
                continue
        ours.told.wait_for(lambda told: len(told.lost) == 1)
        theirs.told.wait_for(lambda told: len(told.lost) == 1)
        assert isinstance(tickets[-1].error, PeerLost)
        assert ours.told.lost[0][0] == peer
        for late in (
            ours.transport.post(peer, writes_of((ours.base, theirs.base, 8))),
            ours.transport.notify(peer, b""),
        ):
            assert isinstance(late.error, PeerLost)

    def test_disconnecting_ends_one_peer_and_leaves_the_others(self, make_side: Callable[..., Side]) -> None:
        ours, theirs, third = make_side(), make_side(), make_side()
        gone, stays = ours.transport.connect(theirs.at, SOON_S), ours.transport.connect(third.at, SOON_S)
        ours.transport.disconnect(gone)
        ours.transport.disconnect(gone)
        ours.told.wait_for(lambda told: len(told.lost) == 1)
        theirs.told.wait_for(lambda told: len(told.lost) == 1)
        ours.transport.notify(stays, b"still here").wait(SOON_S)
        assert ours.told.lost[0][0] == gone

    def test_nothing_is_handled_of_a_peer_that_its_handler_has_dropped(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair
        theirs.told.go.clear()
        theirs.told.on_arrival = lambda back, _: theirs.transport.disconnect(back)
        ours.memory.write(ours.base, b"\xff" * 64)
        ours.transport.notify(peer, b"bad")
        ours.transport.post(peer, writes_of((ours.base, theirs.base, 64)))
        late = ours.transport.notify(peer, b"more")
        time.sleep(0.05)  # all of it lies in the receiver's buffers by now
        theirs.told.go.set()
        theirs.told.wait_for(lambda told: len(told.lost) == 1)
        with pytest.raises(PeerLost):
            late.wait(SOON_S)
        assert [message for _, message in theirs.told.messages] == [b"bad"]
        assert theirs.read(0, 64) == bytes(64)

    def test_a_slow_peer_is_refused_more_without_blocking_and_keeps_what_was_taken(
        self, make_side: Callable[..., Side]
    ) -> None:
        limit = 4 * Side.SIZE
        ours, theirs = make_side(max_open_bytes=limit), make_side()
        data = os.urandom(Side.SIZE)
        ours.memory.write(ours.base, data)
        peer = ours.transport.connect(theirs.at, SOON_S)
        theirs.told.go.clear()
        ours.transport.notify(peer, b"held up")
        whole = writes_of((ours.base, theirs.base, Side.SIZE))
        started = time.monotonic()
        tickets: list[Ticket] = [ours.transport.post(peer, whole) for _ in range(100)]
        assert time.monotonic() - started < SOON_S / 2
        refused = [ticket for ticket in tickets if ticket.done]
        assert len(tickets) - len(refused) == 3
        assert all(isinstance(ticket.error, Congested) for ticket in refused)
        assert theirs.read(0, Side.SIZE) == bytes(Side.SIZE)
        theirs.told.go.set()
        tickets[2].wait(SOON_S)
        assert theirs.read(0, Side.SIZE) == data
        ours.transport.post(peer, whole).wait(SOON_S)

    def test_what_is_kept_lives_until_the_ticket_has_ended(self, pair: tuple[Side, Side, Peer]) -> None:
        ours, theirs, peer = pair
        kept = Kept()
        gone = kept.gone
        theirs.told.go.clear()
        ours.transport.notify(peer, b"held up")
        ticket = ours.transport.post(peer, writes_of((ours.base, theirs.base, 8)), keep=[kept])
        del kept
        assert not gone.wait(0.05)
        theirs.told.go.set()
        ticket.wait(SOON_S)
        assert gone.wait(SOON_S)

    def test_eight_at_once_have_eight_addresses_and_reach_one_another(self, make_side: Callable[..., Side]) -> None:
        sides = [make_side() for _ in range(8)]
        assert len({(side.at.host, side.at.port) for side in sides}) == 8
        assert len({side.at.incarnation for side in sides}) == 8
        for i, side in enumerate(sides):
            data = bytes([i + 1]) * 512
            side.memory.write(side.base, data)
            following = sides[(i + 1) % 8]
            peer = side.transport.connect(following.at, SOON_S)
            side.transport.post(peer, writes_of((side.base, following.base + 1024, 512))).wait(SOON_S)
            assert following.read(1024, 512) == data

    def test_a_closed_transport_serves_no_more_and_closing_twice_changes_nothing(
        self, make_side: Callable[..., Side]
    ) -> None:
        side = make_side()
        side.transport.close(SOON_S)
        side.transport.close(SOON_S)
        with pytest.raises(Refused):
            side.transport.serve(side.told)


def open_files() -> int:
    """How many files and sockets this process has open."""
    return len(os.listdir("/proc/self/fd"))
