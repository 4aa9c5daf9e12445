"""The demo in vLLM: one prompt cold, then from the pool once vLLM's own prefix cache is empty, in bulk and layerwise.

Each way has an engine in a process of its own, as vLLM has one connector a process, and they take turns: what the
machine does meanwhile befalls both. Each has one compute thread: with more, vLLM's threads and those that move KV spin
on the same cores. Imports no vLLM itself.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection

import msgspec
import torch

from layercast.config import Config
from layercast.demo.model import ready
from layercast.demo.process import Process, process
from layercast.demo.report import DemoResult, Taken, in_the_middle
from layercast.demo.scenario import ROUNDS, Options, pool_of

HITS = ("bulk", "layerwise")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Of the engines' processes, which read it before they load vLLM and OpenMP."""
START_S, ANSWER_S = 600.0, 300.0
"""Longest wait for an engine to start, and for an answer."""


class Setup(msgspec.Struct, frozen=True):
    """What an engine's process needs: a converted model's folder, its elements, the pool's settings.

    link_gbps: what the link is paced to, None = not paced.
    """

    folder: str
    dtype: str
    config: Config
    link_gbps: float | None


class Ready(msgspec.Struct, frozen=True):
    """The engine can be asked; the prompt has so many tokens."""

    prompt_tokens: int


class Job(msgspec.Struct, frozen=True):
    """An answer to be given, by its name. empty_pool: forget what was saved first. hit: it must load something."""

    name: str
    empty_pool: bool = False
    hit: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What an answer took."""

    taken: Taken


def run(options: Options, say: Callable[[str], None]) -> DemoResult:
    """Answer the prompt cold and from the pool, ROUNDS times each. Raises Missing, NoDiskSpace, Refused, PeerLost."""
    say(f"loading SmolLM2-135M from {options.cache} into two vLLM engines (the first time takes a minute)")
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)  # the quicker dtype is the one that is quicker in the engines
    folder, dtype = ready(options.cache, options.dtype, options.config.host_bytes)
    with ExitStack() as stack:
        engines: dict[str, Process] = {}
        for name in HITS:
            setup = Setup(str(folder), dtype, pool_of(options, name), options.link_gbps)
            engines[name] = stack.enter_context(process(f"vLLM ({name})", _serve, setup))
        tokens = {engine.receive(Ready, START_S).prompt_tokens for engine in engines.values()}
        say(f"{max(tokens):,} prompt tokens")
        taken = in_turns({name: _asking(engine) for name, engine in engines.items()}, say)
    return in_the_middle(taken, options.link_gbps, f"SmolLM2-135M in vLLM, {dtype}, 1 compute thread")


def in_turns(engines: Mapping[str, Callable[[Job], Taken]], say: Callable[[str], None]) -> dict[str, list[Taken]]:
    """What the answers took, by mode: each engine answers cold and then from the pool, in its turn of every round."""
    taken: dict[str, list[Taken]] = {name: [] for name in ("cold", *engines)}
    for number in range(ROUNDS):
        for name, answer in engines.items():
            say(f"round {number + 1} of {ROUNDS}, cold and {name}")
            cold = answer(Job(f"cold-{number}", empty_pool=True))
            if name == HITS[-1]:  # an engine that loads in bulk saves in bulk too
                taken["cold"].append(cold)
            taken[name].append(answer(Job(f"{name}-{number}", hit=True)))
    return taken


def _asking(engine: Process) -> Callable[[Job], Taken]:
    """Have a process answer. What is called raises Refused, DeadlineExceeded, PeerLost."""

    def answer(job: Job) -> Taken:
        engine.send(job)
        return engine.receive(Answer, ANSWER_S).taken

    return answer


def _serve(connection: Connection, encoded: bytes) -> None:
    from layercast.demo.vllm_engine import serve  # vLLM is loaded in its own process only

    serve(connection, encoded)
