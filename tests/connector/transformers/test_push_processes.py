"""A prefill and a decode process: nothing shared but a socket, a secret and the ticket's bytes."""

import multiprocessing
import os

import msgspec
import pytest
from small_engines import pooled_engine, prompt_of
from tiny_models import tiny_model

from layercast.connector.transformers.requests import Finish, Params
from layercast.control.messages import PushTicket
from layercast.transport.socket import SocketTransport

SECRET = b"0123456789abcdef"
WAIT_S = 60


def prefill_process(family, pipe):
    """Take a ticket and a prompt, push its KV, tell what was computed."""
    with pooled_engine(tiny_model(family), transport=SocketTransport(SECRET)) as engine:
        pipe.send("ready")
        ticket, prompt = pipe.recv()
        engine.submit(prompt, push=msgspec.msgpack.decode(ticket, type=PushTicket))
        outputs = []
        while not outputs:
            outputs = [output.result for output in engine.step() if output.result]
        engine.drain(WAIT_S)
        pipe.send((os.getpid(), outputs[0].finish, outputs[0].computed_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "granite4"])
def test_a_push_between_two_processes_answers_as_a_cold_prompt(models, stock, family):
    prompt = prompt_of(150)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=prefill_process, args=(family, theirs))
    child.start()
    try:
        assert ours.poll(WAIT_S)
        ours.recv()
        with pooled_engine(models(family), transport=SocketTransport(SECRET)) as decode:
            ticket = decode.offer(prompt, Params(max_tokens=20))
            ours.send((msgspec.msgpack.encode(ticket), prompt))
            results = []
            while not results:
                results = [output.result for output in decode.step() if output.result]
            assert ours.poll(WAIT_S)
            pid, finish, computed = ours.recv()
    finally:
        child.join(WAIT_S)
    assert (pid != os.getpid(), finish, computed) == (True, Finish.PUSHED, 149)
    assert (results[0].computed_tokens, results[0].loaded_tokens) == (1, 149)
    assert results[0].tokens == stock(family, tuple(prompt))[0]
