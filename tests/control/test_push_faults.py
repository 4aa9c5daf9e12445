"""What goes wrong between two sides of a push: silence, repeats, lies, refusals. Both sides end, and hold nothing."""

import contextlib
import os
import sys
import threading
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from push_sides import (
    LAYERS,
    OURS,
    THEIRS,
    order_of,
    say,
    send,
    sides,
    stranger,
    until,
)

from layercast.control.messages import Aborted, Confirmed, LayerDone, Taken
from layercast.control.push_states import LIVE, PushState
from layercast.errors import PeerLost, Refused
from layercast.flow.orders import ReceiveOrder
from layercast.move.flights import HostFlight
from layercast.transport.wire import Message, Write, encoded, read_frame


def offered(decode):
    return decode.node.target.offer("r", 24, [THEIRS, THEIRS])


def until_closed(sock):
    """Read what the peer says until it hangs up."""
    with contextlib.suppress(OSError, PeerLost):
        while True:
            read_frame(sock)


def first_half_of_a_write(sock, decode, layer=0):
    """Begin to write a layer's blocks and stop in the middle."""
    array = decode.bytes.arrays[layer]
    size = array.shape[1]
    address = np.array([array[block].ctypes.data for block in THEIRS], "<i8")
    head = encoded(Write(address.tobytes(), np.full(6, size, "<i8").tobytes()))
    sock.sendall(head + b"\x07" * (3 * size))
    until(lambda: (array[THEIRS[2]] == 7).all())


def test_the_receiver_knows_its_peer_before_a_byte_is_written():
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        prefill.node.source.accept(ticket)
        push = decode.node.target.push(ticket.transfer)
        until(lambda: push.peer is not None)
        prefill.transport.disconnect(prefill.node.source.push(ticket.transfer).peer)
        until(lambda: push.state is PushState.LOST and push.quiet)


@pytest.mark.parametrize("ending", ["withdraw", "expire"])
def test_blocks_are_quiet_only_when_a_write_that_was_landing_has_ended(ending):
    with sides(push_timeout_s=10.0) as (_, decode, clock):
        ticket = offered(decode)
        push = decode.node.target.push(ticket.transfer)
        with stranger(ticket.address) as sock:
            say(sock, Taken(ticket.transfer, ticket.epoch))
            first_half_of_a_write(sock, decode)
            if ending == "withdraw":
                decode.node.target.cancel(ticket.transfer, "the client left")
                assert not push.quiet
            clock.advance(11)
            decode.node.expire()
            until(lambda: push.quiet)
            before = decode.bytes.arrays[0].copy()
            with contextlib.suppress(OSError, PeerLost):
                sock.sendall(b"\x08" * 3 * 96)
                until_closed(sock)
            assert np.array_equal(decode.bytes.arrays[0], before)


def test_a_sender_whose_peer_reads_nothing_gets_its_blocks_back_at_the_deadline():
    with sides(push_timeout_s=10.0) as (prefill, decode, clock):
        stuck = threading.Event()
        handle, decode.node.target.handle = decode.node.target.handle, lambda *_: stuck.wait(20)
        ticket = offered(decode)
        send(prefill, ticket)
        push = prefill.node.source.push(ticket.transfer)
        clock.advance(11)
        prefill.node.expire()
        until(lambda: push.quiet and push.run.quiet)
        assert push.state is PushState.EXPIRED
        prefill.node.source.forget(ticket.transfer)
        decode.node.target.handle = handle
        stuck.set()


def test_an_announcement_that_a_slow_peer_does_not_take_ends_the_push_at_once():
    with sides() as (prefill, decode, _):
        prefill.transport.max_open_bytes = 1
        stuck = threading.Event()
        decode.node.target.handle = lambda *_: stuck.wait(20)
        ticket = offered(decode)
        prefill.node.source.accept(ticket)
        order = msgspec.structs.replace(order_of(ticket), pairs=())  # nothing but words goes out
        prefill.node.source.written(order, 0)
        push = prefill.node.source.push(ticket.transfer)
        assert push.state is PushState.ABORTED
        assert "slow or stuck" in push.reason
        stuck.set()


def test_a_layer_that_a_slow_peer_does_not_take_is_never_announced_and_ends_the_push():
    with sides() as (prefill, decode, _):
        prefill.transport.max_open_bytes = 1
        stuck, handle = threading.Event(), decode.node.target.handle
        decode.node.target.handle = lambda peer, said: (stuck.wait(20), handle(peer, said))
        ticket = offered(decode)
        send(prefill, ticket)
        until(lambda: prefill.node.source.push(ticket.transfer).quiet)
        assert prefill.node.source.push(ticket.transfer).state is PushState.ABORTED
        push = decode.node.target.push(ticket.transfer)
        stuck.set()
        until(lambda: push.peer is not None)
        prefill.node.source.forget(ticket.transfer)
        until(lambda: push.quiet)
        assert all(flight.error is not None for flight in push.arrival.flights.values())
        assert not any(decode.bytes.arrays[layer].any() for layer in range(LAYERS))


def test_a_ticket_is_taken_once_by_one_engine():
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        prefill.node.source.accept(ticket)
        with pytest.raises(Refused, match="taken already"):
            prefill.node.source.accept(ticket)
        send_rest(prefill, ticket)
        until(lambda: prefill.node.source.push(ticket.transfer).state is PushState.LANDED)


def send_rest(prefill, ticket):
    for layer in range(LAYERS):
        prefill.node.source.written(order_of(ticket), layer)


def test_a_second_taker_of_a_ticket_writes_nothing_and_does_not_disturb_the_first():
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        prefill.node.source.accept(ticket)
        until(lambda: decode.node.target.push(ticket.transfer).peer is not None)
        with stranger(ticket.address) as sock:
            address = np.array([decode.bytes.arrays[0][THEIRS[0]].ctypes.data], "<i8").tobytes()
            taken = encoded(Message(msgspec.msgpack.encode(Taken(ticket.transfer, ticket.epoch))))
            sock.sendall(taken + encoded(Write(address, np.array([4], "<i8").tobytes())) + b"\xff" * 4)
            until_closed(sock)
        assert not decode.bytes.arrays[0].any()
        send_rest(prefill, ticket)
        until(lambda: prefill.node.source.push(ticket.transfer).state is PushState.LANDED)


@pytest.mark.parametrize("taken", [False, True])
def test_whoever_knows_the_secret_writes_nothing_without_having_taken_the_ticket(taken):
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        if taken:
            prefill.node.source.accept(ticket)
            until(lambda: decode.node.target.push(ticket.transfer).peer is not None)
        address = np.array([decode.bytes.arrays[0][THEIRS[0]].ctypes.data], "<i8").tobytes()
        with stranger(ticket.address) as sock:
            sock.sendall(encoded(Write(address, np.array([4], "<i8").tobytes())) + b"\xff" * 4)
            until_closed(sock)
        assert not decode.bytes.arrays[0].any()
        if not taken:
            prefill.node.source.accept(ticket)
        send_rest(prefill, ticket)
        until(lambda: prefill.node.source.push(ticket.transfer).state is PushState.LANDED)


@pytest.mark.parametrize("over", ["expired", "forgotten", "unknown", "epoch"])
def test_whoever_takes_a_ticket_that_is_over_is_told_at_once(over):
    with sides(push_timeout_s=10.0) as (prefill, decode, clock):
        ticket = offered(decode)
        if over in ("expired", "forgotten"):
            clock.advance(11)
            decode.node.expire()
        if over == "forgotten":
            decode.node.target.forget(ticket.transfer)
        if over == "unknown":
            ticket = msgspec.structs.replace(ticket, transfer="push-0")
        if over == "epoch":
            ticket = msgspec.structs.replace(ticket, epoch=7)
        prefill.node.source.accept(ticket)
        push = prefill.node.source.push(ticket.transfer)
        until(lambda: push.quiet)
        assert push.state is PushState.ABORTED
        assert "offer has ended" in push.reason


def test_a_layer_lands_only_when_every_block_on_offer_was_announced():
    with sides(verify=False) as (_, decode, _clock):
        ticket = offered(decode)
        push = decode.node.target.push(ticket.transfer)
        with stranger(ticket.address) as sock:
            say(sock, Taken(ticket.transfer, ticket.epoch))
            done = partial(LayerDone, ticket.transfer, ticket.epoch, last=True, digests=b"")
            with contextlib.suppress(OSError):  # it may be dropped before all is said
                for blocks in ((), tuple(THEIRS[:5])):
                    for layer in range(LAYERS):
                        say(sock, done(layer=layer, blocks=blocks))
                say(sock, Aborted(ticket.transfer, ticket.epoch, "enough"))
            until(lambda: push.quiet)
        assert push.state is not PushState.LANDED
        assert all(flight.error is not None for flight in push.arrival.flights.values())


def test_a_receiver_that_checks_takes_no_layer_without_digests():
    with sides() as (_, decode, _clock):
        ticket = offered(decode)
        push = decode.node.target.push(ticket.transfer)
        with stranger(ticket.address) as sock:
            say(sock, Taken(ticket.transfer, ticket.epoch))
            say(sock, LayerDone(ticket.transfer, ticket.epoch, 0, True, tuple(THEIRS), b""))
            until(lambda: push.quiet)
        assert not push.arrival.landed
        assert push.state is PushState.LOST


def test_the_sender_takes_digests_where_the_receiver_wants_them():
    with sides() as (prefill, decode, _):
        prefill.node.source._engine = replace(
            prefill.node.source._engine,
            config=msgspec.structs.replace(prefill.node.source._engine.config, verify=False),
        )
        ticket = offered(decode)
        send(prefill, ticket)
        until(lambda: prefill.node.source.push(ticket.transfer).state is PushState.LANDED)


def test_a_push_has_landed_when_its_last_layer_is_let_through():
    with sides() as (prefill, decode, _):
        for _ in range(20):
            ticket = offered(decode)
            push = decode.node.target.push(ticket.transfer)
            ends = []
            for flight in push.arrival.flights.values():
                flight.then(lambda _, push=push, ends=ends: ends.append(push.state))
            send(prefill, ticket)
            until(lambda ends=ends: len(ends) == LAYERS)
            assert ends[-1] is PushState.LANDED
            decode.node.target.forget(ticket.transfer)


def test_a_layer_that_was_announced_is_not_being_sent_any_more():
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        prefill.node.source.accept(ticket)
        push = prefill.node.source.push(ticket.transfer)
        sent, busy = prefill.node.source.sent, []

        def told(push, message):
            busy.append(len(push.run._sending))
            sent(push, message)

        prefill.node.source.sent = told
        for layer in range(LAYERS):
            prefill.node.source.written(order_of(ticket), layer)
            until(lambda layer=layer: len(busy) == layer + 1)
        assert busy == [0] * LAYERS
        until(lambda: push.state is PushState.LANDED)


def test_an_offer_that_is_refused_leaves_no_memory_open():
    with sides() as (_, decode, _clock):
        first = decode.node.target.offer("r", 4, [[7], [7]])
        before = dict(decode.transport._regions._known)
        with pytest.raises(Refused, match="overlap"):
            decode.node.target.offer("r", 24, [[1, 7], [1, 7]])
        assert dict(decode.transport._regions._known) == before
        decode.node.target.cancel(first.transfer, "the test is over")
        assert not decode.transport._regions._known


def test_messages_twice_late_of_other_epochs_or_by_others_change_nothing_that_has_landed():
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        handle, again = decode.node.target.handle, []

        def twice(peer, message):
            handle(peer, message)
            handle(peer, message)
            again.append((peer, message))

        decode.node.target.handle = twice
        send(prefill, ticket)
        push = decode.node.target.push(ticket.transfer)
        until(lambda: push.state is PushState.LANDED)
        nbytes = push.arrival.nbytes
        for peer, message in again:
            handle(peer, message)
            handle(peer, msgspec.structs.replace(message, epoch=99))
        assert (push.state, push.arrival.nbytes) == (PushState.LANDED, nbytes)
        assert nbytes == 6 * LAYERS * 4 * 24
        until(lambda: prefill.node.source.push(ticket.transfer).state is PushState.LANDED)


@pytest.mark.parametrize(
    "lie",
    [
        lambda t: LayerDone(t.transfer, t.epoch, 9, True, (), b""),
        lambda t: LayerDone(t.transfer, t.epoch, -1, True, (), b""),
        lambda t: LayerDone(t.transfer, t.epoch, 0, True, (3,), bytes(8)),
        lambda t: LayerDone(t.transfer, t.epoch, 0, True, (-1,), bytes(8)),
        lambda t: LayerDone(t.transfer, t.epoch, 0, True, (2**63,), bytes(8)),
        lambda t: LayerDone(t.transfer, t.epoch, 0, True, (2, 2), bytes(16)),
        lambda t: LayerDone(t.transfer, t.epoch, 0, True, (2,), bytes(7)),
        lambda t: LayerDone(t.transfer, t.epoch, 0, True, (2,), bytes(16)),
    ],
    ids=range(8),
)
def test_lies_about_layers_end_the_push_and_its_connection(lie):
    with sides() as (_, decode, _clock):
        ticket = offered(decode)
        push = decode.node.target.push(ticket.transfer)
        with stranger(ticket.address) as sock:
            say(sock, Taken(ticket.transfer, ticket.epoch))
            say(sock, lie(ticket))
            until(lambda: push.quiet)
        assert push.state is PushState.LOST
        assert not decode.transport._regions._known


def test_a_confirmation_before_everything_was_sent_ends_the_push():
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        prefill.node.source.accept(ticket)
        push = prefill.node.source.push(ticket.transfer)
        until(lambda: decode.node.target.push(ticket.transfer).peer is not None)
        back = decode.node.target.push(ticket.transfer).peer
        decode.transport.notify(back, msgspec.msgpack.encode(Confirmed(ticket.transfer, ticket.epoch)))
        until(lambda: push.quiet)
        assert push.state is PushState.LOST


@pytest.mark.parametrize("said", [b"", b"\xc1", os.urandom(64), msgspec.msgpack.encode({"type": "push"})], ids=range(4))
def test_garbage_from_a_peer_ends_its_push_alone(said):
    with sides() as (prefill, decode, _):
        ticket, other = offered(decode), decode.node.target.offer("r", 8, [[0, 1], [0, 1]])
        prefill.node.source.accept(ticket)
        with stranger(ticket.address) as sock:
            say(sock, Taken(other.transfer, other.epoch))
            sock.sendall(encoded(Message(said)))
            until(lambda: decode.node.target.push(other.transfer).quiet)
        send_rest(prefill, ticket)
        until(lambda: prefill.node.source.push(ticket.transfer).state is PushState.LANDED)


def damaged(ticket, **changes):
    return msgspec.structs.replace(ticket, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": ()},
        {"blocks": ((1, 2), (1, 2), (1, 2))},
        {"blocks": ((2, 7, 8), (2, 7, 8, 6, 15, 14))},
        {"blocks": ((2, 7, 8, 6, 15, 20), (2, 7, 8, 6, 15, 14))},
        {"blocks": ((2, 7, 8, 6, 15, 2), (2, 7, 8, 6, 15, 14))},
        {"blocks": ((2, 7, 8, 6, 15, -2), (2, 7, 8, 6, 15, 14))},
        {"tokens": 0},
        {"tokens": 2**62},
        {"timeout_s": 0.0},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"identities": ()},
    ],
    ids=str,
)
def test_a_ticket_that_can_not_be_is_refused_before_anybody_is_called(changes):
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        with pytest.raises(Refused):
            prefill.node.source.accept(damaged(ticket, **changes))
        assert not prefill.transport._connections
        assert not prefill.node.source._pushes


def test_a_ticket_for_memory_of_another_shape_is_refused():
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        less = msgspec.structs.replace(ticket.layout, groups=ticket.layout.groups[:1])
        with pytest.raises(Refused):
            prefill.node.source.accept(damaged(ticket, layout=less))
        assert not prefill.transport._connections


def test_a_ticket_with_an_endless_life_ends_with_our_own():
    with sides(push_timeout_s=10.0) as (prefill, decode, clock):
        ticket = damaged(offered(decode), timeout_s=float("inf"))
        prefill.node.source.accept(ticket)
        clock.advance(11)
        prefill.node.expire()
        assert prefill.node.source.push(ticket.transfer).state is PushState.EXPIRED


def test_addresses_that_no_transport_takes_end_the_push_and_not_the_thread():
    with sides() as (prefill, decode, _):
        ticket = offered(decode)
        groups = [
            msgspec.structs.replace(
                group, planes=tuple(msgspec.structs.replace(plane, base=-(1 << 40)) for plane in group.planes)
            )
            for group in ticket.layout.groups
        ]
        ticket = damaged(ticket, layout=msgspec.structs.replace(ticket.layout, groups=tuple(groups)))
        prefill.node.source.accept(ticket)
        push = prefill.node.source.push(ticket.transfer)
        written = HostFlight()
        prefill.mover.mark = lambda: written  # as an accelerator's: it lands later, on a thread of the mover's
        prefill.node.source.written(order_of(ticket), 0)
        written.land()
        until(lambda: push.quiet)
        assert push.state is PushState.ABORTED


def test_a_withdrawal_in_the_midst_of_messages_is_final():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with sides(verify=False) as (prefill, decode, _):
            for _ in range(150):
                ticket = offered(decode)
                prefill.node.source.accept(ticket)
                push = decode.node.target.push(ticket.transfer)
                until(lambda push=push: push.peer is not None)
                done = LayerDone(ticket.transfer, ticket.epoch, 0, False, (), b"")
                said = threading.Thread(
                    target=lambda p=push, m=done: [decode.node.target.handle(p.peer, m) for _ in range(30)]
                )
                said.start()
                decode.node.target.cancel(ticket.transfer, "the client left")
                said.join()
                assert push.state is PushState.ABORTED
                until(lambda push=push: push.quiet)
                decode.node.target.forget(ticket.transfer)
    finally:
        sys.setswitchinterval(before)


def test_random_ends_on_both_sides_leave_both_idle():
    """Every push ends on both sides, all memory is closed again, and whoever says "landed" has every byte."""
    rng = np.random.default_rng(int(os.environ.get("LAYERCAST_SEED", "5")))
    runs = int(os.environ.get("LAYERCAST_RUNS", "60"))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with sides() as (prefill, decode, clock):
            ends = [one_random_push(rng, prefill, decode, clock) for _ in range(runs)]
            until(lambda: not decode.transport._regions._known)
        assert PushState.LANDED in ends
    finally:
        sys.setswitchinterval(before)


def one_random_push(rng, prefill, decode, clock):
    ticket = offered(decode)
    incoming = decode.node.target.push(ticket.transfer)
    flights = decode.node.target.arrivals(ReceiveOrder(ticket.transfer, "r", 24))
    prefill.node.source.accept(ticket)
    outgoing = prefill.node.source.push(ticket.transfer)
    deeds = [
        lambda: decode.node.target.cancel(ticket.transfer, "random"),
        lambda: prefill.node.source.cancel(ticket.transfer, "random"),
        lambda: prefill.transport.disconnect(outgoing.peer),
        lambda: incoming.peer and decode.transport.disconnect(incoming.peer),
        lambda: None,
    ]
    deed, delay = deeds[rng.integers(len(deeds))], float(rng.uniform(0, 0.004))
    timer = threading.Timer(delay, deed)
    timer.start()
    for layer in range(LAYERS):
        for block in range(6):
            prefill.bytes.write(layer, OURS[block], list(range(block + 1)), salt=ticket.transfer)
        prefill.node.source.written(order_of(ticket), layer)
        threading.Event().wait(float(rng.uniform(0, 0.001)))
    timer.join()
    until(lambda: outgoing.quiet and outgoing.run.quiet and outgoing.state not in LIVE)
    with contextlib.suppress(AssertionError):
        until(lambda: incoming.quiet, 0.3)
    if incoming.peer is None:  # the word that the ticket is taken was lost with the connection: the deadline ends it
        clock.advance(1000)
        decode.node.expire()
    until(lambda: incoming.quiet and incoming.state not in LIVE)
    for layer, flight in flights.items():
        if flight.error is None:
            assert all(decode.bytes.holds(layer, b, list(range(i + 1)), ticket.transfer) for i, b in enumerate(THEIRS))
        else:
            assert incoming.state is not PushState.LANDED
    prefill.node.source.forget(ticket.transfer)
    decode.node.target.forget(ticket.transfer)
    return incoming.state
