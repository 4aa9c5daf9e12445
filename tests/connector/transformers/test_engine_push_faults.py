"""Engines whose push goes wrong: blocks stay held while anybody may write them, and answers are those of a cold run."""

import contextlib
import os
import pickle
import socket
import sys
import threading
import time

import numpy as np
import pytest
from small_engines import flip, pooled_engine, prompt_of
from test_pushes import LONG, SECRET, finished, pair

from layercast.connector.transformers.requests import Finish, Params
from layercast.control.messages import LayerDone, Taken, encode
from layercast.errors import LayoutMismatch, PeerLost, Refused
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
    config = {"layer_wait_ms": 50, "push_timeout_s": 1.5, "verify": False}
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


@pytest.mark.parametrize(
    ("changes", "field"), [({"block_size": 8, "state_block": 64}, "block_size"), ({"block_major": True}, None)]
)
def test_an_engine_of_other_block_size_is_refused_by_name_and_one_of_other_strides_is_not(models, changes, field):
    prompt = prompt_of(37)
    with (
        pooled_engine(models("llama"), transport=SocketTransport(SECRET), **changes) as prefill,
        pooled_engine(models("llama"), transport=SocketTransport(SECRET)) as decode,
    ):
        ticket = decode.offer(prompt, LONG)
        refused = pytest.raises(LayoutMismatch, match=field) if field else contextlib.nullcontext()
        with refused:
            prefill.submit(prompt, push=ticket)
        if field:
            assert (prefill.idle, prefill.pushes.pending) == (True, 0)
            assert not prefill.pushes.node._transport._connections
            decode.abort(ticket.request)
        finished(prefill)
        finished(decode)


def test_a_ticket_of_an_earlier_life_on_the_same_port_is_refused_and_a_new_one_is_good(models, stock):
    prompt = prompt_of(37)
    with pooled_engine(models("llama"), transport=SocketTransport(SECRET)) as prefill:
        with pooled_engine(models("llama"), transport=SocketTransport(SECRET)) as decode:
            old = decode.offer(prompt, LONG)
            decode.abort(old.request)
        with pooled_engine(models("llama"), transport=SocketTransport(SECRET, port=old.address.port)) as decode:
            ticket = decode.offer(prompt, LONG)
            with pytest.raises(PeerLost, match="restarted"):
                prefill.submit(prompt, push=old)
            prefill.submit(prompt, push=ticket)
            finished(prefill)
            (result,) = finished(decode)
    assert (result.tokens, result.loaded_tokens) == (stock("llama", tuple(prompt))[0], 36)


def test_a_ticket_is_good_once_and_another_secret_never(models, stock):
    prompt = prompt_of(37)
    with (
        pair(models("llama")) as (prefill, decode),
        pooled_engine(models("llama"), transport=SocketTransport(b"quite another secret")) as stranger,
        pooled_engine(models("llama"), transport=SocketTransport(SECRET)) as second,
    ):
        ticket = decode.offer(prompt, LONG)
        with pytest.raises(PeerLost, match="secret"):
            stranger.submit(prompt, push=ticket)
        prefill.submit(prompt, push=ticket)
        with pytest.raises(Refused, match="taken already"):
            prefill.submit(prompt, push=ticket)
        second.submit(prompt, push=ticket)
        finished(second)
        second.drain(10)
        finished(prefill)
        (result,) = finished(decode)
        assert stranger.idle
    assert (result.tokens, result.loaded_tokens) == (stock("llama", tuple(prompt))[0], 36)


def test_an_engine_pushes_to_itself(models, stock):
    prompt = prompt_of(37)
    with pooled_engine(models("llama"), transport=SocketTransport(SECRET)) as engine:
        ticket = engine.offer(prompt, LONG)
        engine.submit(prompt, push=ticket)
        results = {result.request: result for result in finished(engine)}
    assert (results[ticket.request].tokens, results[ticket.request].loaded_tokens) == (
        stock("llama", tuple(prompt))[0],
        36,
    )


@pytest.mark.slow
def test_a_hundred_pushes_at_once_land_beside_strangers_at_the_port(models, stock):
    prompts = [prompt_of(18, seed) for seed in range(100)]
    how = Params(max_tokens=2)
    with pair(models("llama"), blocks=400, max_batch=100) as (prefill, decode):
        tickets = [decode.offer(prompt, how) for prompt in prompts]
        place = (tickets[0].address.host, tickets[0].address.port)
        with contextlib.ExitStack() as stack:
            loris = [stack.enter_context(socket.create_connection(place, 5)) for _ in range(9)]
            for sock, said in zip(
                loris, [b"\x20", b"GET / HTTP/1.1\r\n\r\n", pickle.dumps(os.getcwd)] * 4, strict=False
            ):
                sock.sendall(said)
            for prompt, ticket in zip(prompts, tickets, strict=True):
                prefill.submit(prompt, push=ticket)
            finished(prefill)
            results = {result.request: result for result in finished(decode)}
        prefill.drain(10)
    assert {results[ticket.request].loaded_tokens for ticket in tickets} == {17}
    for prompt, ticket in list(zip(prompts, tickets, strict=True))[::20]:
        assert results[ticket.request].tokens == stock("llama", tuple(prompt))[0][:2]


def test_aborts_at_random_on_both_sides_leave_both_at_rest_and_answers_right(models, stock):
    rng = np.random.default_rng(int(os.environ.get("LAYERCAST_SEED", "1")))
    runs = int(os.environ.get("LAYERCAST_RUNS", "3"))
    family = ["llama", "gemma3", "granite4"]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for run in range(runs):
            one_random_run(rng, models, stock, family[run % 3])
    finally:
        sys.setswitchinterval(before)


def one_random_run(rng, models, stock, family):
    prompts = [
        prompt_of(int(n), int(seed)) for n, seed in zip(rng.choice([2, 16, 17, 33, 70], 3), range(3), strict=True)
    ]
    asked, chance = {}, rng.uniform(0, 0.2)
    with pair(models(family)) as (prefill, decode):
        for prompt in prompts:
            ticket = decode.offer(prompt, Params(max_tokens=4))
            asked[ticket.request] = (prompt, prefill.submit(prompt, push=ticket))
        stop = threading.Event()
        other = threading.Thread(
            target=serve, args=(prefill, stop, np.random.default_rng(int(rng.integers(1 << 30))), chance)
        )
        other.start()
        try:
            results = serve(decode, stop, rng, chance, until_idle=True)
        finally:
            stop.set()
            other.join(20)
    assert len(results) == len(asked)
    for result in results:
        if result.finish is not Finish.ABORTED:
            assert result.tokens == stock(family, tuple(asked[result.request][0]))[0][:4]


def serve(engine, stop, rng, chance, until_idle=False):
    """Step an engine, and abort one of its requests now and then."""
    results = []
    while engine._live if until_idle else not (stop.is_set() and not engine._live):
        if engine._live and rng.random() < chance:
            results.append(engine.abort(rng.choice(sorted(engine._live))))
        if engine.idle:
            stop.wait(0.002)
        else:
            results += [output.result for output in engine.step() if output.result]
    return results
