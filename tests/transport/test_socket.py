import contextlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest

from layercast.errors import BadSetting, PeerLost
from layercast.testing.transport_laws import SECRET, SOON_S, Side, TransportLaws, writes_of
from layercast.transport import listener
from layercast.transport.base import Address
from layercast.transport.listener import advertised
from layercast.transport.socket import SocketTransport
from layercast.transport.wire import MAX_HEADER, Ack, Hello, Write, encoded, greet


class TestSocketTransport(TransportLaws):
    def make_transport(self, secret=SECRET, **limits):
        return SocketTransport(secret, **limits)


@pytest.fixture
def side():
    side = Side(SocketTransport(SECRET))
    yield side
    side.transport.close(SOON_S)


def stranger(side):
    sock = socket.create_connection((side.at.host, side.at.port), SOON_S)
    sock.settimeout(SOON_S)
    return sock


def drained(sock):
    """True once the other side has closed the stream; what it said before does not matter."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


HELLO = Hello(1, "x" * 32, bytes(32))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        pickle.dumps(os.getcwd) * 100,
        b"\xff" * 100,
        b"\0" * 100,
        (1 << 31).to_bytes(4, "little") + b"x" * 1000,
        encoded(HELLO)[:-1] + b"\xc1",
        encoded(Ack(1)),
        encoded(Hello(2, "x", bytes(32))),
        encoded(Hello(1, "x", b"short")),
        encoded(HELLO) + encoded(HELLO),
        encoded(HELLO) + encoded(Write(b"", b"")),
    ],
    ids=range(11),
)
def test_whoever_proves_nothing_is_dropped_and_the_others_are_served(side, said):
    with stranger(side) as sock:
        with contextlib.suppress(OSError):  # it may be dropped before all is said
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        assert drained(sock)
    other = Side(SocketTransport(SECRET))
    other.transport.notify(other.transport.connect(side.at, SOON_S), b"hello").wait(SOON_S)
    other.transport.close(SOON_S)
    assert [message for _, message in side.told.messages] == [b"hello"]


def authenticated(side):
    sock = stranger(side)
    greet(sock, SECRET, "f" * 32, calling=True, deadline=time.monotonic() + SOON_S)
    sock.settimeout(SOON_S)
    return sock


def ints(*values):
    return np.array(values, "<i8").tobytes()


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 4,
        (MAX_HEADER + 1).to_bytes(4, "little"),
        b"\x04\0\0\0\xc1\xc1\xc1\xc1",
        encoded(Ack(1)),
        encoded(Ack(0)),
        encoded(Ack(-5)),
        encoded(HELLO),
        encoded(Write(b"", b"")),
        encoded(Write(b"1234567", b"1234567")),
        encoded(Write(ints(1, 2), ints(1))),
        encoded(Write(ints(2**62), ints(2**62))),
        encoded(Write(ints(-(2**63)), ints(2**63 - 1))),
    ],
    ids=range(12),
)
def test_a_peer_that_breaks_the_protocol_is_dropped_and_no_memory_is_taken(side, said):
    tracemalloc.start()
    with authenticated(side) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(said)
        assert drained(sock)
    side.told.wait_for(lambda told: len(told.lost) == 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500_000
    assert side.read(0, Side.SIZE) == bytes(Side.SIZE)


def test_lengths_that_no_region_holds_are_refused_before_a_byte_is_read(side):
    bad = [(side.base, -1), (side.base, 0), (side.base, 2**63 - 1), (side.base + 8, Side.SIZE), (-8, 16)]
    for count, (address, length) in enumerate(bad, start=1):
        with authenticated(side) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(encoded(Write(ints(side.base, address), ints(8, length))) + b"\xff" * 64)
            assert drained(sock)
        side.told.wait_for(lambda told, count=count: len(told.lost) == count)
    assert side.read(0, Side.SIZE) == bytes(Side.SIZE)


def test_a_greeting_that_is_never_finished_ends_by_its_deadline(side, monkeypatch):
    monkeypatch.setattr(listener, "GREETING_S", 0.2)
    started = time.monotonic()
    with stranger(side) as sock:
        sock.sendall(b"\x20")
        assert drained(sock)
    assert time.monotonic() - started < SOON_S


def test_more_strangers_than_are_waited_for_are_dropped_at_once(side, monkeypatch):
    monkeypatch.setattr(listener, "MAX_STRANGERS", 2)
    waiting = [stranger(side) for _ in range(2)]
    for sock in waiting:
        assert sock.recv(1, socket.MSG_PEEK) or True
    with stranger(side) as third:
        assert drained(third)
    for sock in waiting:
        sock.close()


def test_whoever_has_proved_the_secret_is_no_stranger_however_busy_this_side_is(monkeypatch):
    """A caller that connects again and again while threads are slow to run was taken for a crowd of strangers."""
    monkeypatch.setattr(listener, "MAX_STRANGERS", 1)
    go, came = threading.Event(), []
    door = listener.Listener("127.0.0.1", 0, SECRET, "x", lambda *peer: (go.wait(SOON_S), came.append(peer)))
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", door.port), SOON_S))
            greet(sock, SECRET, "f" * 32, calling=True, deadline=time.monotonic() + SOON_S)
        go.set()
        door.close(time.monotonic() + SOON_S)
    for sock, _ in came:
        sock.close()
    assert len(came) == 5


def test_a_recorded_greeting_proves_nothing_the_second_time(side):
    class Recording:
        def __init__(self, sock):
            self.sock, self.sent = sock, b""

        def sendall(self, data):
            self.sent += data
            self.sock.sendall(data)

        def __getattr__(self, name):
            return getattr(self.sock, name)

    with stranger(side) as sock:
        recording = Recording(sock)
        greet(recording, SECRET, "f" * 32, calling=True, deadline=time.monotonic() + SOON_S)
    with stranger(side) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(recording.sent)
            sock.shutdown(socket.SHUT_WR)
        assert drained(sock)
    side.told.wait_for(lambda told: len(told.lost) == 1)


CHILD = """
import sys, threading
from layercast.testing.transport_laws import SECRET, Side
from layercast.transport.socket import SocketTransport
side = Side(SocketTransport(SECRET, port=int(sys.argv[1])))
print(side.at.port, side.at.incarnation, side.base, flush=True)
threading.Event().wait(60)
"""


class Child:
    """A process with a transport."""

    def __init__(self, port=0):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(port)], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        said = self.process.stdout.readline().split()
        self.at = Address("socket", "127.0.0.1", int(said[0]), said[1])
        self.base = int(said[2])

    def kill(self):
        self.process.kill()
        self.process.wait(SOON_S)
        self.process.stdout.close()


def test_a_killed_peer_fails_its_open_tickets_and_restarted_on_the_same_port_it_is_another(side):
    port = 0
    for _ in range(2):
        child = Child(port)
        port = child.at.port
        peer = side.transport.connect(child.at, SOON_S)
        whole = writes_of((side.base, child.base, Side.SIZE))
        side.transport.post(peer, whole).wait(SOON_S)
        child.process.send_signal(signal.SIGSTOP)
        tickets = [side.transport.post(peer, whole) for _ in range(200)]
        started = time.monotonic()
        child.kill()
        with pytest.raises(PeerLost):
            tickets[-1].wait(SOON_S)
        assert time.monotonic() - started < SOON_S
        assert all(ticket.done for ticket in tickets)
        side.told.wait_for(lambda told, peer=peer: told.lost[-1:] != [] and told.lost[-1][0] == peer)
    revived = Child(port)
    with pytest.raises(PeerLost, match="restarted"):
        side.transport.connect(child.at, SOON_S)
    peer = side.transport.connect(revived.at, SOON_S)
    side.transport.post(peer, writes_of((side.base, revived.base, 64))).wait(SOON_S)
    revived.kill()


def test_a_listener_outlives_a_want_of_file_descriptors(side):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = socket.socket()
    sock.settimeout(SOON_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        sock.connect((side.at.host, side.at.port))
        time.sleep(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    greet(sock, SECRET, "f" * 32, calling=True, deadline=time.monotonic() + SOON_S)
    sock.close()
    side.told.wait_for(lambda told: len(told.lost) == 1)


def test_a_lost_peer_is_told_with_its_reason_whoever_noticed_first(side):
    other = Side(SocketTransport(SECRET))
    for count in range(1, 30):
        peer = other.transport.connect(side.at, SOON_S)
        other.transport.disconnect(peer)
        other.told.wait_for(lambda told, count=count: len(told.lost) == count)
        side.told.wait_for(lambda told, count=count: len(told.lost) == count)
    other.transport.close(SOON_S)
    assert {str(error) for _, error in other.told.lost} == {"this side dropped the connection"}
    assert not any("never connected" in str(error) for _, error in side.told.lost)


def test_it_listens_on_loopback_only_unless_told_otherwise(side):
    assert side.at.host == "127.0.0.1"
    assert side.at.port > 0


def test_a_taken_port_is_refused_with_the_port_and_a_way_out(side):
    second = SocketTransport(SECRET, port=side.at.port)
    with pytest.raises(BadSetting, match=rf"{side.at.port}.*port 0"):
        second.serve(side.told)
    second.close(SOON_S)


def test_what_is_advertised_may_differ_from_what_is_bound_but_must_be_callable():
    assert advertised("127.0.0.1", None) == "127.0.0.1"
    assert advertised("10.0.0.7", None) == "10.0.0.7"
    assert advertised("0.0.0.0", "kv-3.example") == "kv-3.example"
    for bind, advertise in (("0.0.0.0", "0.0.0.0"), ("::", "::"), ("0.0.0.0", "127.0.0.1"), ("10.0.0.7", "localhost")):
        with pytest.raises(BadSetting, match="this machine's own"):
            advertised(bind, advertise)


def test_a_wildcard_is_advertised_as_this_machines_address_or_refused_with_advice():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        routed = probe.connect_ex(("192.0.2.1", 9)) == 0
    if routed:
        assert advertised("0.0.0.0", None) not in ("0.0.0.0", "127.0.0.1")
    else:
        with pytest.raises(BadSetting, match="advertise"):
            advertised("0.0.0.0", None)


def test_a_paced_link_carries_its_rate_and_not_more():
    ours, theirs = Side(SocketTransport(SECRET, link_gbps=0.08)), Side(SocketTransport(SECRET))  # 1e7 bytes a second
    peer = ours.transport.connect(theirs.at, SOON_S)
    started = time.monotonic()
    tickets = [ours.transport.post(peer, writes_of((ours.base, theirs.base, 50_000))) for _ in range(20)]
    tickets[-1].wait(SOON_S)
    took = time.monotonic() - started
    for side in (ours, theirs):
        side.transport.close(SOON_S)
    assert 0.1 <= took < 1.0
    with pytest.raises(BadSetting, match="more than 0"):
        SocketTransport(SECRET, link_gbps=0.0)


def test_closing_while_a_peer_is_stuck_ends_by_its_deadline_and_later_well(side):
    other = Side(SocketTransport(SECRET))
    peer = other.transport.connect(side.at, SOON_S)
    side.told.go.clear()
    held = threading.Timer(0.2, side.told.go.set)
    other.transport.notify(peer, b"held up")
    for _ in range(100):
        other.transport.post(peer, writes_of((other.base, side.base, Side.SIZE)))
    held.start()
    other.transport.close(SOON_S)
    held.join()
