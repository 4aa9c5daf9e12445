"""A second process that prefills for the demo: it computes a prompt and pushes each layer to whoever holds the ticket.

Process and parent speak msgpack over a pipe; the KV goes over a loopback socket. Does not know what is shown.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from layercast.config import Config
from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.engine import EngineSettings
from layercast.connector.transformers.requests import Params
from layercast.control.messages import PushTicket
from layercast.demo.model import load
from layercast.errors import DeadlineExceeded, PeerLost
from layercast.observe.timeline import Span, Timeline
from layercast.transport.socket import SocketTransport

SETTINGS = EngineSettings(blocks=128, chunk_blocks=96)
"""Of both processes. One chunk holds the whole prompt, so that a picture shows one pass through the layers."""
START_S, END_S = 120.0, 30.0
"""Longest wait for the process to load its model, and to end."""


class Setup(msgspec.Struct, frozen=True):
    """What the process needs: a converted model's folder, its elements, compute threads, a shared secret.

    warm_up: a prompt to run first. link_gbps: what the link is paced to, None = not paced.
    """

    folder: str
    dtype: str
    threads: int
    secret: bytes
    config: Config
    warm_up: list[int]
    link_gbps: float | None


class Job(msgspec.Struct, frozen=True):
    """A prompt, and where its KV is to go."""

    prompt: list[int]
    ticket: PushTicket


class Done(msgspec.Struct, frozen=True):
    """The process's id, and what it spent its time on (times of this machine's monotonic clock)."""

    pid: int
    spans: tuple[Span, ...]


class Prefiller:
    """The parent's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ready(self) -> None:
        """Wait until the process can take a job. Raises DeadlineExceeded, PeerLost."""
        self._receive(START_S)

    def start(self, job: Job) -> None:
        """Let it compute and push; returns at once. Raises PeerLost."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(job))
        except OSError as error:
            raise PeerLost("the prefill process has died; its own words are above") from error

    def done(self, timeout_s: float) -> Done:
        """What it did, once its push has ended. Raises DeadlineExceeded, PeerLost."""
        return msgspec.msgpack.decode(self._receive(timeout_s), type=Done)

    def _receive(self, timeout_s: float) -> bytes:
        try:
            if not self._connection.poll(timeout_s):
                raise DeadlineExceeded(f"the prefill process said nothing for {timeout_s:g} s")
            return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise PeerLost("the prefill process has died; its own words are above") from error


@contextmanager
def prefill_process(setup: Setup) -> Iterator[Prefiller]:
    """Start the process; it ends with the context, by force after END_S, at once on Ctrl-C. Of the main thread."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, msgspec.msgpack.encode(setup)), daemon=True)
    told = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: a terminal's Ctrl-C reaches both, the parent acts
    process.start()
    signal.signal(signal.SIGINT, told)
    theirs.close()
    try:
        yield Prefiller(ours)
    except KeyboardInterrupt:
        process.kill()
        raise
    finally:
        ours.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _serve(connection: Connection, encoded: bytes) -> None:
    """The process: jobs until the parent goes away."""
    setup = msgspec.msgpack.decode(encoded, type=Setup)
    torch.set_num_threads(setup.threads)
    model, _ = load(Path(setup.folder), setup.dtype)
    timeline = Timeline()
    transport = SocketTransport(setup.secret, link_gbps=setup.link_gbps)
    with open_engine(model, setup.config, SETTINGS, transport=transport, timeline=timeline) as engine:
        engine.generate([setup.warm_up], Params(max_tokens=2, load=False, save=False))
        connection.send_bytes(b"ready")
        while (job := _next_job(connection)) is not None:
            timeline.clear()
            engine.submit(job.prompt, Params(save=False), push=job.ticket)
            while not engine.idle:
                engine.step()
            engine.drain(setup.config.push_timeout_s)
            connection.send_bytes(msgspec.msgpack.encode(Done(os.getpid(), timeline.spans())))


def _next_job(connection: Connection) -> Job | None:
    """The next job; None once the parent has gone."""
    try:
        return msgspec.msgpack.decode(connection.recv_bytes(), type=Job)
    except EOFError:
        return None
