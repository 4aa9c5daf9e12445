"""Either process of a push is killed or stopped at every phase; the other one answers, and holds nothing afterwards."""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time

import msgspec
import pytest
from small_engines import pooled_engine, prompt_of
from test_pushes import LONG, SECRET, finished

from layercast.connector.transformers.requests import Finish
from layercast.control import push_source, push_target
from layercast.control.messages import Confirmed, LayerDone, PushTicket, Taken, decode
from layercast.errors import DeadlineExceeded, PeerLost
from layercast.transport import connection, listener, socket, wire
from layercast.transport.socket import SocketTransport

CONFIG = {"push_timeout_s": 1.0, "layer_wait_ms": 300}
LAST = 3
"""The last layer of the model; the prompt below is pushed in two parts."""
PROMPT = prompt_of(70)


def deadly(module, name, sign, when=lambda *_: True, before=None):
    """Let this process be hit when a function is called with such arguments; `before` is done first."""
    inner = getattr(module, name)

    def hit(*args, **named):
        if when(*args):
            if before is not None:
                before(inner, *args)
            os.kill(os.getpid(), sign)
        return inner(*args, **named)

    setattr(module, name, hit)


def half(inner, sock, buffers):
    """Send or fill the first half of a write only."""
    buffers = list(buffers)
    inner(sock, [*buffers[:-1], buffers[-1][: len(buffers[-1]) // 2]])


def is_layer(layer):
    return lambda _self, _push, message: message.layer == layer


def heard(kind, layer=None):
    return lambda _self, _peer, said: isinstance(said, kind) and (layer is None or said.layer == layer)


def says(kind):
    return lambda _self, _peer, message: isinstance(decode(message), kind)


SENDER = {
    "connecting": lambda sign: deadly(socket, "greet", sign),
    "handshake": lambda sign: deadly(wire, "_mac", sign),
    "taking": lambda sign: deadly(SocketTransport, "notify", sign, says(Taken)),
    "first layer": lambda sign: deadly(connection, "send", sign, lambda _, bufs: len(bufs) > 1, half),
    "between layers": lambda sign: deadly(push_source.PushSource, "sent", sign, is_layer(1)),
    "last layer": lambda sign: deadly(push_source.PushSource, "sent", sign, is_layer(LAST)),
    "confirmation": lambda sign: deadly(push_source.PushSource, "handle", sign, heard(Confirmed)),
}
RECEIVER = {
    "connecting": lambda sign: deadly(listener.Listener, "_greet", sign),
    "handshake": lambda sign: deadly(wire, "_mac", sign),
    "taking": lambda sign: deadly(push_target.PushTarget, "handle", sign, heard(Taken)),
    "first layer": lambda sign: deadly(connection, "fill", sign, before=half),
    "between layers": lambda sign: deadly(push_target.PushTarget, "handle", sign, heard(LayerDone, 1)),
    "last layer": lambda sign: deadly(push_target.PushTarget, "handle", sign, heard(LayerDone, LAST)),
    "confirmation": lambda sign: deadly(SocketTransport, "notify", sign, says(Confirmed)),
}


def sender(pipe, model, arm, sign):
    with pooled_engine(model, CONFIG, transport=SocketTransport(SECRET)) as engine:
        ticket = msgspec.msgpack.decode(pipe.recv(), type=PushTicket)
        arm(sign)
        with contextlib.suppress(PeerLost, DeadlineExceeded):
            engine.submit(PROMPT, push=ticket)
        finished(engine)
        threading.Event().wait(20)


def receiver(pipe, model, arm, sign):
    with pooled_engine(model, CONFIG, transport=SocketTransport(SECRET)) as engine:
        arm(sign)
        pipe.send(msgspec.msgpack.encode(engine.offer(PROMPT, LONG)))
        finished(engine)
        threading.Event().wait(20)


@contextlib.contextmanager
def child(role, *args):
    """A process of its own; hit or not, it is gone afterwards."""
    gc.collect()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=role, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(10)
        ours.close()


def was_hit(process, sign):
    """Wait until the process is dead, or stopped."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if sign == signal.SIGKILL and process.exitcode == -signal.SIGKILL:
            return True
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/stat") as stat:
            if sign == signal.SIGSTOP and stat.read().rsplit(")", 1)[1].split()[0] == "T":
                return True
        time.sleep(0.01)
    return False


def revived(process, sign):
    """Let a stopped process go on for a while: it must not disturb who has long given it up."""
    if sign == signal.SIGSTOP:
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.2)


SIGNS = [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.slow
@pytest.mark.parametrize("sign", SIGNS, ids=["kill", "stop"])
@pytest.mark.parametrize("phase", list(SENDER))
def test_a_receiver_outlives_its_sender(models, stock, phase, sign):
    with (
        child(sender, models("llama"), SENDER[phase], sign) as (process, pipe),
        pooled_engine(models("llama"), CONFIG, transport=SocketTransport(SECRET)) as engine,
    ):
        ticket = engine.offer(PROMPT, LONG)
        pipe.send(msgspec.msgpack.encode(ticket))
        started = time.monotonic()
        (result,) = finished(engine)
        engine.drain(5)
        assert time.monotonic() - started < 5
        assert was_hit(process, sign)
        assert not engine.pushes.node.target._pushes
        assert not engine.pushes.node._transport._regions._known
        revived(process, sign)
        (again,) = engine.generate([PROMPT], LONG)
    assert result.tokens == again.tokens == stock("llama", tuple(PROMPT))[0]


@pytest.mark.slow
@pytest.mark.parametrize("sign", SIGNS, ids=["kill", "stop"])
@pytest.mark.parametrize("phase", list(RECEIVER))
def test_a_sender_outlives_its_receiver(models, stock, phase, sign):
    with (
        child(receiver, models("llama"), RECEIVER[phase], sign) as (process, pipe),
        pooled_engine(models("llama"), CONFIG, transport=SocketTransport(SECRET)) as engine,
    ):
        assert pipe.poll(20)
        ticket = msgspec.msgpack.decode(pipe.recv(), type=PushTicket)
        started = time.monotonic()
        with contextlib.suppress(PeerLost, DeadlineExceeded):
            engine.submit(PROMPT, push=ticket)
        results = finished(engine)
        engine.drain(5)
        assert time.monotonic() - started < 5
        assert was_hit(process, sign)
        assert not engine.pushes.node.source._pushes
        # Only where it has checked everything may its word still have left before the signal came.
        ends = {Finish.UNDELIVERED, Finish.PUSHED} if phase == "confirmation" else {Finish.UNDELIVERED}
        assert {result.finish for result in results} <= ends
        revived(process, sign)
        (again,) = engine.generate([PROMPT], LONG)
    assert again.tokens == stock("llama", tuple(PROMPT))[0]
