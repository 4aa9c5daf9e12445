"""Engines whose push goes wrong: blocks stay held while anybody may write them, and answers are those of a cold run."""

import contextlib
import socket
import time

import numpy as np
import pytest
from small_engines import flip, pooled_engine, prompt_of
from test_pushes import LONG, SECRET, finished, pair

from layercast.connector.transformers.requests import Params
from layercast.control.messages import LayerDone, Taken, encode
from layercast.spec.planes import PlaneKind
from layercast.transport.socket import SocketTransport
from layercast.transport.wire import Message, Write, encoded, greet


def bare_writer(ticket):
    """A raw connection of somebody who knows the secret and has taken the ticket."""
    sock = socket.create_connection((ticket.address.host, ticket.address.port), 5)
    greet(sock, SECRET, "f" * 32, calling=True, deadline=time.monotonic() + 5)
    sock.sendall(encoded(Message(encode(Taken(ticket.transfer, ticket.epoch)))))
    return sock


def test_blocks_of_a_late_layer_stay_held_while_a_write_to_them_may_go_on(models, stock):
    prompt = prompt_of(37)
    config = {"layer_wait_ms": 50, "push_timeout_s": 2.0, "verify": False}
    with pooled_engine(models("llama"), config, transport=SocketTransport(SECRET)) as decode:
        ticket = decode.offer(prompt, LONG)
        with bare_writer(ticket) as sock:
            blocks = ticket.blocks[0]
            sock.sendall(encoded(Message(encode(LayerDone(ticket.transfer, ticket.epoch, 0, True, blocks, b"")))))
            keys, _ = decode.memory.rows(1)
            row = keys[blocks[0]]
            size = row.numel() * row.element_size()
            head = encoded(Write(np.array([row.data_ptr()], "<i8").tobytes(), np.array([size], "<i8").tobytes()))
            sock.sendall(head + b"\xff" * (size // 2))
            (result,) = finished(decode)
            others = decode.generate([prompt_of(100, seed) for seed in range(2)], Params(max_tokens=2))
            push = decode.pushes.node.target.push(ticket.transfer)
            assert not push.quiet
            assert set(blocks) <= set(decode.space.allocators[0].references())
            decode.drain(10)
            with contextlib.suppress(OSError):
                sock.sendall(b"\xff" * (size // 2))
    assert [len(other.tokens) for other in others] == [2, 2]
    assert result.tokens == stock("llama", tuple(prompt))[0]


@pytest.mark.parametrize("layer", [0, 2])
def test_what_was_computed_from_a_load_that_failed_is_never_pushed_whole(models, stock, layer):
    prompt = prompt_of(40)
    with pair(models("llama")) as (prefill, decode):
        prefill.generate([prompt], Params(max_tokens=1))
        prefill.drain(10)
        layers = prefill.memory.layout.layers
        flip(prefill, prompt[:39], layers[layer if layer == 0 else -1], PlaneKind.VALUE)
        prefill.submit(prompt, push=decode.offer(prompt, LONG))
        finished(prefill)
        (result,) = finished(decode)
    assert result.tokens == stock("llama", tuple(prompt))[0]
    assert result.loaded_tokens == 0
