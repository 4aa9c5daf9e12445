"""A second process that prefills for the demo: it computes a prompt and pushes each layer to whoever holds the ticket.

The KV goes over a loopback socket. Does not know what is shown.
"""

import os
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
from layercast.demo.process import Process, jobs, process, say
from layercast.observe.timeline import Span, Timeline
from layercast.transport.socket import SocketTransport

SETTINGS = EngineSettings(blocks=128, chunk_blocks=96)
"""Of both processes. One chunk holds the whole prompt, so that a picture shows one pass through the layers."""
START_S = 120.0
"""Longest wait for the process to load its model."""


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


class Ready(msgspec.Struct, frozen=True):
    """The process can take a job."""


class Prefiller:
    """The parent's end."""

    def __init__(self, child: Process) -> None:
        self._child = child

    def ready(self) -> None:
        """Wait until the process can take a job. Raises DeadlineExceeded, PeerLost."""
        self._child.receive(Ready, START_S)

    def start(self, job: Job) -> None:
        """Let it compute and push; returns at once. Raises PeerLost."""
        self._child.send(job)

    def done(self, timeout_s: float) -> Done:
        """What it did, once its push has ended. Raises DeadlineExceeded, PeerLost."""
        return self._child.receive(Done, timeout_s)


@contextmanager
def prefill_process(setup: Setup) -> Iterator[Prefiller]:
    """Start the process, which ends with the context (`process`)."""
    with process("prefill", _serve, setup) as child:
        yield Prefiller(child)


def _serve(connection: Connection, encoded: bytes) -> None:
    """The process: jobs until the parent goes away."""
    setup = msgspec.msgpack.decode(encoded, type=Setup)
    torch.set_num_threads(setup.threads)
    model, _ = load(Path(setup.folder), setup.dtype)
    timeline = Timeline()
    transport = SocketTransport(setup.secret, link_gbps=setup.link_gbps)
    with open_engine(model, setup.config, SETTINGS, transport=transport, timeline=timeline) as engine:
        engine.generate([setup.warm_up], Params(max_tokens=2, load=False, save=False))
        say(connection, Ready())
        for job in jobs(connection, Job):
            timeline.clear()
            engine.submit(job.prompt, Params(save=False), push=job.ticket)
            while not engine.idle:
                engine.step()
            engine.drain(setup.config.push_timeout_s)
            say(connection, Done(os.getpid(), timeline.spans()))
