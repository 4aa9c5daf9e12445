"""What the demo shows: a table, one line on what moved, JSON and pictures, all from plain values.

Does not know how the values came about.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from layercast.errors import Refused
from layercast.observe.pictures import Panel, write_html, write_png
from layercast.observe.receipts import Receipt
from layercast.observe.timeline import Span
from layercast.observe.traces import write_trace

MODES = ("cold", "bulk", "layerwise", "push")
NOTES = {
    "cold": "Nothing to load: all is computed; KV is saved, of many layers at a time, behind compute.",
    "bulk": "Layer 0 waits until the KV of all layers has arrived; only then does anything compute.",
    "layerwise": "Each layer waits for its own KV only; that of later layers arrives while it computes.",
    "push": "Another process computes the prompt; each layer's KV arrives once written, not at the end. "
    "It still computes its last layer past the first token, which needs only that layer's KV.",
}
COLUMNS = ("", "TTFT ms", "vs cold", "computed", "loaded", "KV MB", "waited", "hidden", "verified")
CAPTION = (
    "TTFT: time to the first token, the median of {rounds} rounds. computed, loaded: tokens of the prompt.\n"
    "waited: ms that the forward waited for KV. hidden: part of the transfer behind compute.\n"
)
PUSH_CAPTION = (
    "push: another process computes all but one token, so TTFT holds its compute;\n"
    "waited: ms from its last layer's end to the landing of its last KV.\n"
)
TITLE = "Where the time to the first token goes"


class ModeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One way of answering, as it stands in demo.json.

    prompt_tokens = computed_tokens + loaded_tokens. bytes, layers: KV that moved to this answer's engine.
    transfer_ms: from the first copy's start to the last one's end (of a push: the sum of its copies).
    exposed_ms: what the forward waited for it (of a push: what landed after the sender's last layer), None = not known.
    overlap: 1 - exposed / transfer, None without a transfer, or where that is not known.
    verified: every landed layer's digest equals the one taken at saving, None where nothing landed. pids: processes
    that took part. link_gbps: what the copies were paced to, None = not paced. rounds: ttft_ms of every round; the
    figures are those of the round in the middle.
    """

    ttft_ms: float
    prompt_tokens: int
    computed_tokens: int
    loaded_tokens: int
    bytes: int
    layers: int
    exposed_ms: float | None
    overlap: float | None
    verified: bool | None
    pids: tuple[int, ...]
    text: str
    transfer_ms: float = 0.0
    link_gbps: float | None = None
    rounds: tuple[float, ...] = ()


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """All ways of answering, by the names in MODES, with the spans of each (times since its request)."""

    modes: Mapping[str, ModeResult]
    spans: Mapping[str, tuple[Span, ...]]
    link_gbps: float | None = None
    about: str = ""


Taken = tuple[ModeResult, tuple[Span, ...]]
"""Figures and spans of one answer."""


def mode_of(receipt: Receipt, ttft_s: float, text: str) -> ModeResult:
    """The figures of an answer by this process."""
    return ModeResult(
        ttft_ms=ttft_s * 1e3,
        prompt_tokens=receipt.prompt_tokens,
        computed_tokens=receipt.computed_tokens,
        loaded_tokens=receipt.loaded_tokens,
        bytes=receipt.nbytes,
        layers=receipt.layers,
        transfer_ms=receipt.transfer_s * 1e3,
        exposed_ms=None if receipt.exposed_s is None else receipt.exposed_s * 1e3,
        overlap=receipt.overlap,
        verified=receipt.verified if receipt.loaded_tokens else None,
        pids=(os.getpid(),),
        text=text,
    )


def in_the_middle(taken: Mapping[str, Sequence[Taken]], link_gbps: float | None, about: str) -> DemoResult:
    """Of each mode's answers the one in the middle: one sample on a busy machine says little."""
    middle = {name: sorted(each, key=lambda one: one[0].ttft_ms)[len(each) // 2] for name, each in taken.items()}
    modes = {
        name: msgspec.structs.replace(mode, link_gbps=link_gbps, rounds=tuple(one.ttft_ms for one, _ in taken[name]))
        for name, (mode, _) in middle.items()
    }
    return DemoResult(
        modes=modes, spans={name: each for name, (_, each) in middle.items()}, link_gbps=link_gbps, about=about
    )


def until_first_token(spans: Sequence[Span], zero_s: float, length_s: float) -> tuple[Span, ...]:
    """Spans that began before the first token, with times since the request."""
    return tuple(
        msgspec.structs.replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s)
        for span in spans
        if 0.0 <= span.start_s - zero_s < length_s
    )


def moved_line(modes: Mapping[str, ModeResult]) -> str:
    """The line that says what moved and whether every byte of it was checked.

    Raises Refused when nothing moved, since then the demo shows nothing.
    """
    moved = [mode for mode in modes.values() if mode.loaded_tokens]
    if not moved:
        raise Refused("no KV moved in any mode: is host_bytes smaller than the prompt's KV?")
    check = "verified" if all(mode.verified for mode in moved) else "NOT verified"
    return (
        f"KV moved: {sum(mode.bytes for mode in moved):,} bytes, {max(mode.layers for mode in moved)} layers, {check}"
    )


def table_of(result: DemoResult) -> Table:
    """One row a mode."""
    table = Table(
        title=_with_link(result, result.about or TITLE),
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    cold = result.modes["cold"].ttft_ms if "cold" in result.modes else None
    for name, mode in result.modes.items():
        share = f"{mode.ttft_ms / cold:.0%}" if cold else "-"
        waited = "-" if mode.exposed_ms is None else f"{mode.exposed_ms:,.0f}"
        moved = (f"{mode.bytes / 1e6:,.1f}", waited) if mode.loaded_tokens else ("-", "-")
        hidden = "-" if mode.overlap is None else f"{mode.overlap:.0%}"
        checked = ("yes" if mode.verified else "NO") if mode.loaded_tokens else "-"
        counts = (f"{mode.computed_tokens:,}", f"{mode.loaded_tokens:,}")
        table.add_row(name, f"{mode.ttft_ms:,.0f}", share, *counts, *moved, hidden, checked)
    return table


def answers(modes: Mapping[str, ModeResult]) -> str:
    """The answer, once where all modes agree, else each mode's own."""
    texts = {mode.text for mode in modes.values()}
    if len(texts) == 1:
        return f"All answer: {texts.pop().strip()}"
    return "The answers differ:\n" + "\n".join(f"  {name}: {mode.text.strip()}" for name, mode in modes.items())


def panels_of(result: DemoResult) -> tuple[Panel, ...]:
    """One panel a mode that has spans."""
    return tuple(
        Panel(name, spans, NOTES.get(name, ""), result.modes[name].ttft_ms / 1e3)
        for name, spans in result.spans.items()
        if spans
    )


def encoded(result: DemoResult) -> bytes:
    """The modes as JSON, numbers to the microsecond."""
    plain = _rounded(msgspec.to_builtins(result.modes))
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"


def write_pictures(result: DemoResult, out: Path) -> None:
    """Write timeline.html, timeline.png and trace.json (Perfetto) into `out`, which exists."""
    panels, title = panels_of(result), _with_link(result, TITLE)
    write_html(panels, out / "timeline.html", title)
    write_trace(panels, out / "trace.json")
    write_png(panels, out / "timeline.png", title)


def write_terminal(result: DemoResult, out: Path, json: Path, console: Console | None = None) -> None:
    """Print the table, the answer, the line on what moved, and where the files are."""
    console = console or Console()
    console.print(table_of(result))
    counts = sorted({len(mode.rounds) or 1 for mode in result.modes.values()})
    rounds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]
    caption = CAPTION.format(rounds=rounds) + (PUSH_CAPTION if "push" in result.modes else "")
    console.print(caption, style="dim", highlight=False, soft_wrap=True)
    console.print(answers(result.modes), markup=False)
    console.print(moved_line(result.modes), style="bold", highlight=False, soft_wrap=True)
    console.print(
        f"Pictures: {out / 'timeline.png'}, {out / 'timeline.html'}; for ui.perfetto.dev: {out / 'trace.json'}; "
        f"figures: {json}",
        highlight=False,
        soft_wrap=True,
    )


def _rounded(value: object) -> object:
    """Floats to three places, wherever they stand in plain values."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value


def _with_link(result: DemoResult, title: str) -> str:
    if result.link_gbps is None:
        return f"{title} (link not paced)"
    return f"{title} (link paced to {result.link_gbps:g} Gbit/s)"
