"""Pushes between two engines: layers land as they are written, and every end is told to both sides."""

import numpy as np
import pytest
from push_sides import BLOCK, LAYERS, OURS, THEIRS, TOKENS, send, sides, until

from layercast.control.push_states import PushState
from layercast.errors import LayercastError
from layercast.flow.orders import ReceiveOrder


def test_every_byte_of_every_layer_lands_and_both_sides_know():
    with sides() as (prefill, decode, _):
        before = {layer: array.copy() for layer, array in decode.bytes.arrays.items()}
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        flights = decode.node.target.arrivals(ReceiveOrder(ticket.transfer, "r", 24))
        send(prefill, ticket, OURS)
        for layer in range(LAYERS):
            flights[layer].wait(5)
            for block in range(6):
                assert decode.bytes.holds(layer, THEIRS[block], TOKENS[: (block + 1) * BLOCK])
            untouched = [b for b in range(20) if b not in THEIRS]
            assert np.array_equal(decode.bytes.arrays[layer][untouched], before[layer][untouched])
        assert decode.node.target.push(ticket.transfer).state is PushState.LANDED
        assert decode.node.target.push(ticket.transfer).arrival.nbytes == 6 * LAYERS * BLOCK * 24
        until(lambda: prefill.node.source.push(ticket.transfer).state is PushState.LANDED)
        decode.node.target.forget(ticket.transfer)
        prefill.node.source.forget(ticket.transfer)


def test_a_layer_lands_before_later_layers_are_written():
    with sides() as (prefill, decode, _):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        flights = decode.node.target.arrivals(ReceiveOrder(ticket.transfer, "r", 24))
        send(prefill, ticket, OURS, stop_before=(1, 2))
        flights[0].wait(5)
        flights[1].wait(5)
        assert not flights[2].done
        assert not flights[3].done


def test_a_prefill_that_gives_up_fails_the_decode_side_and_leaves_its_blocks_quiet():
    with sides() as (prefill, decode, _):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        flights = decode.node.target.arrivals(ReceiveOrder(ticket.transfer, "r", 24))
        send(prefill, ticket, OURS, stop_before=(1, 1))
        prefill.node.source.cancel(ticket.transfer, "the prompt was too long")
        with pytest.raises(LayercastError, match="too long"):
            flights[3].wait(5)
        push = decode.node.target.push(ticket.transfer)
        assert push.state is PushState.ABORTED
        until(lambda: push.quiet)


def test_a_decode_side_that_gives_up_stops_the_prefill_and_gets_its_blocks_back():
    with sides() as (prefill, decode, _):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        send(prefill, ticket, OURS, stop_before=(1, 1))
        until(lambda: decode.node.target.push(ticket.transfer).state is PushState.MOVING)
        decode.node.target.cancel(ticket.transfer, "the client left")
        push = decode.node.target.push(ticket.transfer)
        until(lambda: push.quiet)
        until(lambda: prefill.node.source.push(ticket.transfer).state in (PushState.ABORTED, PushState.LOST))
        decode.node.target.forget(ticket.transfer)


def test_an_offer_that_nobody_takes_ends_at_its_deadline_with_quiet_blocks():
    with sides(push_timeout_s=10.0) as (_, decode, clock):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        clock.advance(11)
        decode.node.expire()
        push = decode.node.target.push(ticket.transfer)
        assert push.state is PushState.EXPIRED
        assert push.quiet


def test_a_silent_prefill_is_left_at_the_deadline():
    with sides(push_timeout_s=10.0) as (prefill, decode, clock):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        flights = decode.node.target.arrivals(ReceiveOrder(ticket.transfer, "r", 24))
        send(prefill, ticket, OURS, stop_before=(1, 0))
        until(lambda: decode.node.target.push(ticket.transfer).peer is not None)
        clock.advance(11)
        decode.node.expire()
        with pytest.raises(LayercastError, match="push_timeout_s is over"):
            flights[0].wait(5)
        until(lambda: decode.node.target.push(ticket.transfer).quiet)


def test_a_lost_prefill_fails_what_has_not_landed():
    with sides() as (prefill, decode, _):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        flights = decode.node.target.arrivals(ReceiveOrder(ticket.transfer, "r", 24))
        send(prefill, ticket, OURS, stop_before=(1, 2))
        flights[0].wait(5)
        prefill.node._transport.disconnect(prefill.node.source.push(ticket.transfer).peer)
        with pytest.raises(LayercastError):
            flights[3].wait(5)
        push = decode.node.target.push(ticket.transfer)
        until(lambda: push.quiet)
        assert push.state is PushState.LOST
        assert flights[0].error is None


def test_a_byte_that_changes_on_the_way_is_noticed():
    with sides() as (prefill, decode, _):
        ticket = decode.node.target.offer("r", 24, [THEIRS, THEIRS])
        flights = decode.node.target.arrivals(ReceiveOrder(ticket.transfer, "r", 24))
        announced = decode.node.target.push(ticket.transfer).arrival.announced

        def spoil(layer, last, *rest):
            if (layer, last) == (2, True):
                decode.bytes.arrays[2][THEIRS[3]][5] ^= 1
            announced(layer, last, *rest)

        decode.node.target.push(ticket.transfer).arrival.announced = spoil
        send(prefill, ticket, OURS)
        with pytest.raises(LayercastError, match="layer 2: 1 blocks differ"):
            flights[2].wait(5)
        until(lambda: decode.node.target.push(ticket.transfer).state is PushState.CORRUPT)
