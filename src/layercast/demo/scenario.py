"""The demo's scenario: one chat prompt behind a long shared prefix, answered cold, from the pool in bulk and layerwise,
and pushed by a second process.

Each way of answering has an engine and a pool of its own, so none profits from another. Knows the engine adapter and
the model, nothing of terminals, files or pictures.
"""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layercast.config import Config
from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.engine import Engine
from layercast.connector.transformers.requests import Params, Result
from layercast.demo.model import load, prepare, quicker_dtype
from layercast.demo.prefill import Done, Job, Setup, prefill_process
from layercast.demo.prompt import EARLIER_QUESTION, QUESTION, conversation
from layercast.demo.report import DemoResult, ModeResult
from layercast.errors import BadSetting, Refused
from layercast.flow.orders import LoadOutcome
from layercast.observe.receipts import overlap
from layercast.observe.timeline import Span, SpanKind, Timeline
from layercast.transport.socket import SocketTransport

MOST_TOKENS = 24
SLAB_BYTES = 256 << 20
"""Plenty for the demo's prompt; a default slab would be filled with pages for nothing."""
DRAIN_S = 30.0
DTYPES = ("auto", "bfloat16", "float32")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may choose. link_gbps: pace the link, None = as fast as it goes. dtype: one of DTYPES."""

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
    """Answer the prompt in every mode; `say` is told what takes time. Raises BadSetting, Missing, NoDiskSpace."""
    if options.dtype not in DTYPES:
        raise BadSetting(f"dtype = {options.dtype!r}: known: {', '.join(DTYPES)}")
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core is left to the thread that moves KV
    say("loading SmolLM2-135M (the first run converts it, half a minute)")
    folder = prepare(options.cache)
    dtype = quicker_dtype() if options.dtype == "auto" else getattr(torch, options.dtype)
    guest = _guest(folder, dtype)
    modes: dict[str, ModeResult] = {}
    spans: dict[str, tuple[Span, ...]] = {}
    for name in ("cold", "bulk", "layerwise"):
        say(f"{name}: {len(guest.prompt):,} prompt tokens")
        modes[name], spans[name] = _answer(guest, options, name)
    say("push: a second process computes, this one answers")
    modes["push"], spans["push"] = _pushed(guest, options, folder)
    about = f"SmolLM2-135M, {str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} compute thread(s)"
    return DemoResult(modes=modes, spans=spans, link_gbps=options.link_gbps, about=about)


def _guest(folder: Path, dtype: torch.dtype) -> Guest:
    model, tokenizer = load(folder, dtype)

    def ids(question: str) -> list[int]:
        text = tokenizer.apply_chat_template(conversation(question), tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text)["input_ids"])

    assert model.generation_config is not None
    ends = model.generation_config.eos_token_id
    return Guest(
        model, tokenizer, ids(QUESTION), ids(EARLIER_QUESTION), tuple(ends) if isinstance(ends, list) else (ends,)
    )


def _answer(guest: Guest, options: Options, name: str) -> tuple[ModeResult, tuple[Span, ...]]:
    """One mode's figures, and its spans in seconds since the request, up to the first token."""
    config = _config(options, name)
    timeline = Timeline()
    with open_engine(guest.model, config, link_gbps=options.link_gbps, timeline=timeline) as engine:
        _warm_up(engine, guest)
        if name != "cold":
            engine.generate([guest.earlier], Params(max_tokens=1))
        engine.drain(DRAIN_S)
        timeline.clear()
        started_s = time.monotonic()
        (result,) = engine.generate([guest.prompt], Params(max_tokens=MOST_TOKENS, stop=guest.stop))
        engine.drain(DRAIN_S)
    mode = _figures(guest, result)
    if name != "cold" and not mode.loaded_tokens:
        raise Refused(
            f"{name}: nothing was loaded; is host_bytes or kv_recompute_threshold set so that nothing can be?"
        )
    return mode, _until_first_token(timeline.spans(), started_s, result.ttft_s)


def _config(options: Options, name: str) -> Config:
    room = min(options.config.host_bytes, SLAB_BYTES)
    return msgspec.structs.replace(options.config, use_layerwise=name != "bulk", host_bytes=room)


def _pushed(guest: Guest, options: Options, folder: Path) -> tuple[ModeResult, tuple[Span, ...]]:
    """The prompt computed by another process, whose layers land here as they are written; spans of both."""
    config = _config(options, "push")
    dtype = str(guest.model.dtype).removeprefix("torch.")
    setup = Setup(str(folder), dtype, torch.get_num_threads(), secrets.token_bytes(32), config, options.link_gbps)
    timeline = Timeline()
    with (
        prefill_process(setup) as prefiller,
        open_engine(guest.model, config, transport=SocketTransport(setup.secret), timeline=timeline) as engine,
    ):
        _warm_up(engine, guest)
        prefiller.ready()
        timeline.clear()
        started_s = time.monotonic()
        ticket = engine.offer(guest.prompt, Params(max_tokens=MOST_TOKENS, stop=guest.stop, save=False))
        prefiller.start(Job(guest.prompt, ticket))
        result = _finished(engine, ticket.request)
        done = prefiller.done(config.push_timeout_s)
        engine.drain(DRAIN_S)
    mode = _push_figures(_figures(guest, result), done)
    ours = (span for span in timeline.spans() if span.kind is not SpanKind.WAIT)  # it waits for all of it
    spans = (*ours, *done.spans)
    return mode, _until_first_token(spans, started_s, result.ttft_s)


def _push_figures(mode: ModeResult, done: Done) -> ModeResult:
    """A push's transfer is hidden as far as it runs behind the sender's compute; the receiver waits for both."""
    pushes = [span for span in done.spans if span.kind is SpanKind.PUSH]
    computed_s = max((span.end_s for span in done.spans if span.kind is SpanKind.COMPUTE), default=0.0)
    exposed_s = max(0.0, max((span.end_s for span in pushes), default=0.0) - computed_s)
    return msgspec.structs.replace(
        mode,
        bytes=sum(span.nbytes for span in pushes),
        exposed_ms=exposed_s * 1e3,
        overlap=overlap(sum(span.end_s - span.start_s for span in pushes), exposed_s),
        pids=(done.pid, os.getpid()),
    )


def _finished(engine: Engine, request: str) -> Result:
    """Step until the request's answer is whole; a push that never comes ends by its own deadline."""
    while True:
        for output in engine.step():
            if output.request == request and output.result is not None:
                return output.result


def _warm_up(engine: Engine, guest: Guest) -> None:
    """One forward of each kind outside the pool, since first calls of a kernel are slow."""
    engine.generate([guest.prompt[:64]], Params(max_tokens=2, load=False, save=False))


def _figures(guest: Guest, result: Result) -> ModeResult:
    loads = [receipt for receipt in result.receipts if isinstance(receipt, LoadOutcome)]
    transfer_s, exposed_s = sum(load.transfer_s for load in loads), sum(load.exposed_s for load in loads)
    return ModeResult(
        ttft_ms=result.ttft_s * 1e3,
        prompt_tokens=result.prompt_tokens,
        computed_tokens=result.computed_tokens,
        loaded_tokens=result.loaded_tokens,
        bytes=sum(load.nbytes for load in loads),
        layers=max((load.layers for load in loads), default=0),
        exposed_ms=exposed_s * 1e3,
        overlap=overlap(transfer_s, exposed_s),
        verified=bool(loads) and all(load.verified for load in loads),
        pids=(os.getpid(),),
        text=str(guest.tokenizer.decode(result.tokens, skip_special_tokens=True)),
    )


def _until_first_token(spans: tuple[Span, ...], zero_s: float, length_s: float) -> tuple[Span, ...]:
    """Spans that began before the first token, with times since the request."""
    return tuple(
        msgspec.structs.replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s)
        for span in spans
        if 0.0 <= span.start_s - zero_s < length_s
    )
