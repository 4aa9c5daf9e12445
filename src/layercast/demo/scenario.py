"""The demo's scenario: one chat prompt behind a long shared prefix, answered cold, from the pool in bulk and layerwise,
and pushed by a second process.

Each way of answering has an engine and a pool of its own, so none profits from another. Knows the engine adapter and
the model, nothing of terminals, files or pictures.
"""

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layercast.config import Config
from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.engine import Engine
from layercast.connector.transformers.requests import Params, Result
from layercast.demo.model import load, prompt_ids, ready
from layercast.demo.prefill import SETTINGS, Done, Job, Prefiller, Setup, prefill_process
from layercast.demo.prompt import EARLIER_QUESTION, QUESTION
from layercast.demo.report import MODES, DemoResult, ModeResult, Taken, in_the_middle, mode_of, until_first_token
from layercast.errors import Refused
from layercast.observe.receipts import overlap
from layercast.observe.timeline import SpanKind, Timeline
from layercast.transport.socket import SocketTransport

MOST_TOKENS = 24
SLAB_BYTES = 256 << 20
"""Plenty for the demo's prompt; a default slab would be filled with pages for nothing."""
DRAIN_S = 30.0
ROUNDS = 3
"""Modes take turns."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may choose. link_gbps: pace the link, None = as fast as it goes.

    dtype: bfloat16, float32, or auto: the quicker one here.
    """

    config: Config
    cache: Path
    link_gbps: float | None = None
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Guest:
    """The loaded model and what is asked of it: token ids of two prompts, and those that end an answer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompt: list[int]
    earlier: list[int]
    stop: tuple[int, ...]


def run(options: Options, say: Callable[[str], None]) -> DemoResult:
    """Answer the prompt in every mode, in turns; `say` is told what takes time. Raises Missing, NoDiskSpace."""
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core is left to the thread that moves KV
    say(f"loading SmolLM2-135M from {options.cache} (the first run converts it there, half a minute)")
    folder, dtype = ready(options.cache, options.dtype, options.config.host_bytes)
    guest = _guest(folder, dtype)
    taken: dict[str, list[Taken]] = {name: [] for name in MODES}
    with ExitStack() as stack:
        ways = _ways(guest, options, folder, stack)
        for number in range(ROUNDS):
            for name, answer in ways.items():
                say(f"round {number + 1} of {ROUNDS}, {name}: {len(guest.prompt):,} prompt tokens")
                taken[name].append(answer())
    threads = torch.get_num_threads()
    about = f"SmolLM2-135M, {dtype}, {threads} compute thread{'s' * (threads > 1)}"
    return in_the_middle(taken, options.link_gbps, about)


def _ways(guest: Guest, options: Options, folder: Path, stack: ExitStack) -> dict[str, Callable[[], Taken]]:
    """A call for each mode that answers the prompt once; engines live as long as `stack`."""
    ways: dict[str, Callable[[], Taken]] = {"cold": lambda: _cold(guest, options)}
    for name in ("bulk", "layerwise"):
        timeline = Timeline()
        opened = open_engine(
            guest.model, pool_of(options, name), SETTINGS, link_gbps=options.link_gbps, timeline=timeline
        )
        engine = stack.enter_context(opened)
        engine.generate([guest.earlier], Params(max_tokens=2))
        engine.drain(DRAIN_S)
        ways[name] = partial(_answered, guest, engine, timeline, name)
    ways["push"] = _push_way(guest, options, folder, stack)
    return ways


def _guest(folder: Path, dtype: str) -> Guest:
    model, tokenizer = load(folder, dtype)
    assert model.generation_config is not None
    ends = model.generation_config.eos_token_id
    prompts = (prompt_ids(tokenizer, QUESTION), prompt_ids(tokenizer, EARLIER_QUESTION))
    return Guest(model, tokenizer, *prompts, tuple(ends) if isinstance(ends, list) else (ends,))


def _cold(guest: Guest, options: Options) -> Taken:
    """The prompt in an engine whose pool is empty; its KV is saved on the way."""
    timeline = Timeline()
    with open_engine(guest.model, pool_of(options, "cold"), SETTINGS, timeline=timeline) as engine:
        return _answered(guest, engine, timeline)


def _answered(guest: Guest, engine: Engine, timeline: Timeline, hit: str = "") -> Taken:
    """One answer's figures, and its spans in seconds since the request, up to the first token.

    hit: the mode that must load something, and saves nothing. Raises Refused, with the receipt's reason, if it loaded
    nothing.
    """
    timeline.clear()
    started_s = time.monotonic()
    (result,) = engine.generate([guest.prompt], Params(max_tokens=MOST_TOKENS, stop=guest.stop, save=not hit))
    engine.drain(DRAIN_S)
    if hit and not result.loaded_tokens:
        raise Refused(f"{hit}: nothing was loaded. {result.receipt.sentence}")
    return _figures(guest, result), until_first_token(timeline.spans(), started_s, result.ttft_s)


def pool_of(options: Options, name: str) -> Config:
    """The settings of the pool that answers in the mode of that name."""
    room = min(options.config.host_bytes, SLAB_BYTES)
    return msgspec.structs.replace(options.config, use_layerwise=name != "bulk", host_bytes=room)


def _push_way(guest: Guest, options: Options, folder: Path, stack: ExitStack) -> Callable[[], Taken]:
    """The prompt computed by another process, whose layers land here as they are written."""
    config = pool_of(options, "push")
    dtype = str(guest.model.dtype).removeprefix("torch.")
    threads, secret = torch.get_num_threads(), secrets.token_bytes(32)
    setup = Setup(str(folder), dtype, threads, secret, config, guest.earlier, options.link_gbps)
    timeline = Timeline()
    prefiller = stack.enter_context(prefill_process(setup))
    opened = open_engine(guest.model, config, SETTINGS, transport=SocketTransport(secret), timeline=timeline)
    engine = stack.enter_context(opened)
    engine.generate([guest.prompt[:64]], Params(max_tokens=2, load=False, save=False))
    prefiller.ready()
    return partial(_pushed, guest, engine, timeline, prefiller)


def _pushed(guest: Guest, engine: Engine, timeline: Timeline, prefiller: Prefiller) -> Taken:
    """One pushed answer, with the spans of both processes."""
    timeline.clear()
    started_s = time.monotonic()
    ticket = engine.offer(guest.prompt, Params(max_tokens=MOST_TOKENS, stop=guest.stop, save=False))
    prefiller.start(Job(guest.prompt, ticket))
    result = _finished(engine, ticket.request)
    done = prefiller.done(ticket.timeout_s)
    engine.drain(DRAIN_S)
    theirs = (
        msgspec.structs.replace(span, kind=SpanKind.REMOTE) if span.kind is SpanKind.COMPUTE else span
        for span in done.spans
        if span.kind in (SpanKind.COMPUTE, SpanKind.PUSH)
    )
    spans = until_first_token((*timeline.spans(), *theirs), started_s, result.ttft_s)
    return _push_figures(_figures(guest, result), done), spans


def _push_figures(mode: ModeResult, done: Done) -> ModeResult:
    """A push's transfer is hidden as far as it runs behind the sender's compute; the receiver waits for both."""
    pushes = [span for span in done.spans if span.kind is SpanKind.PUSH]
    computed_s = max((span.end_s for span in done.spans if span.kind is SpanKind.COMPUTE), default=0.0)
    transfer_s = sum(span.end_s - span.start_s for span in pushes)
    exposed_s = max(0.0, max((span.end_s for span in pushes), default=0.0) - computed_s)
    return msgspec.structs.replace(
        mode,
        bytes=sum(span.nbytes for span in pushes),
        transfer_ms=transfer_s * 1e3,
        exposed_ms=exposed_s * 1e3,
        overlap=overlap(transfer_s, exposed_s),
        pids=(done.pid, os.getpid()),
    )


def _finished(engine: Engine, request: str) -> Result:
    """Step until the request's answer is whole; a push that never comes ends by its own deadline."""
    while True:
        for output in engine.step():
            if output.request == request and output.result is not None:
                return output.result


def _figures(guest: Guest, result: Result) -> ModeResult:
    return mode_of(result.receipt, result.ttft_s, str(guest.tokenizer.decode(result.tokens, skip_special_tokens=True)))
