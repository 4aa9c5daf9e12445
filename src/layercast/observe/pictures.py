"""Timelines as pictures: compute and copies by layer, a panel for each way of getting KV; a PNG and an HTML page.

Knows spans only. matplotlib is imported when a PNG is drawn, never before.
"""

import html
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import msgspec

from layercast.errors import Refused
from layercast.observe.bars import save_png
from layercast.observe.timeline import Span, SpanKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    SpanKind.COMPUTE: "#0072B2",
    SpanKind.REMOTE: "#56B4E9",
    SpanKind.WAIT: "#B9B9B9",
    SpanKind.LOAD: "#E69F00",
    SpanKind.SAVE: "#009E73",
    SpanKind.PUSH: "#CC79A7",
}
"""Okabe and Ito's colours, which stay apart for every common colour vision."""
WORDS = {
    SpanKind.COMPUTE: "layer computes",
    SpanKind.REMOTE: "layer computes in the other process",
    SpanKind.WAIT: "compute waits",
    SpanKind.LOAD: "KV loads from the pool",
    SpanKind.SAVE: "KV saves to the pool",
    SpanKind.PUSH: "KV arrives from the other process",
}
HOW_TO_READ = (
    "A row is one layer of the model, time runs to the right. In each row: above, the layer computing (or waiting); "
    "below, its KV being copied."
)
OWN_AXES = " Mind the time axes: not all panels have the same."
LANES = dict.fromkeys((SpanKind.COMPUTE, SpanKind.REMOTE, SpanKind.WAIT), (0.06, 0.50))
"""Top and height of a kind's bar inside its row of height 1; copies lie in the lower part."""
COPY_LANE = (0.58, 0.36)
NOTE_LETTERS = 90
"""In a line of a note; as many as are as wide as a panel."""


class Panel(msgspec.Struct, frozen=True):
    """One picture of one run. title: the mode; note: what to see in it.

    Times are seconds since the request. first_token_s: the answer's start.
    """

    title: str
    spans: tuple[Span, ...]
    note: str = ""
    first_token_s: float = 0.0

    @property
    def length_s(self) -> float:
        """Seconds to the last span's end, or to the first token."""
        return max(self.first_token_s, *(span.end_s for span in self.spans), 0.0)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that appear, ascending."""
        return tuple(sorted({span.layer for span in self.spans}))


def scales_ms(panels: Sequence[Panel]) -> tuple[float, ...]:
    """Length of each panel's time axis: one for all, or the longest its own where it would dwarf the others."""
    lengths = [panel.length_s * 1e3 for panel in panels]
    longest = max(lengths)
    rest = [length for length in lengths if length < longest / 2.5]
    short = max(rest, default=longest)
    return tuple((short if length in rest else longest) * 1.04 for length in lengths)


def how_to_read(scales: Sequence[float]) -> str:
    """What a reader must know of panels whose time axes have these lengths."""
    return HOW_TO_READ + (OWN_AXES if len(set(scales)) > 1 else "")


def write_png(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Draw the panels to `path` as a PNG. Raises Refused without panels or without matplotlib."""
    _check(panels)
    save_png(lambda: figure_of(panels, title), path)


def figure_of(panels: Sequence[Panel], title: str) -> "Figure":
    """The panels, two a row, under a title and above a legend."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    rows = (len(panels) + 1) // 2
    columns = min(2, len(panels))
    spacing = ConstrainedLayoutEngine(h_pad=0.10, w_pad=0.08, hspace=0.05)
    figure = Figure(figsize=(7.2 * columns, 1.7 + 3.9 * rows), dpi=120, layout=spacing)
    figure.suptitle(f"{title}\n", fontsize=15, fontweight="bold")
    scales = scales_ms(panels)
    how, below_title = how_to_read(scales), 1 - 0.47 / figure.get_figheight()
    figure.text(0.5, below_title, how, ha="center", va="top", fontsize=9.5, color="#444", wrap=True)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, panel, scale in zip(axes, panels, scales, strict=False):
        _draw(ax, panel, scale)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    shown = _kinds(panels)
    handles = [
        Patch(facecolor=COLOURS[kind], edgecolor="#888" if kind is SpanKind.WAIT else "none", label=WORDS[kind])
        for kind in shown
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=10)
    return figure


def _draw(ax: "Axes", panel: Panel, scale_ms: float) -> None:
    row_of = {layer: row for row, layer in enumerate(panel.layers)}
    for kind in _kinds([panel]):
        for span in (span for span in panel.spans if span.kind is kind):
            top, height = LANES.get(kind, COPY_LANE)
            left, width = _ms(span)
            width = max(width, scale_ms / 400)  # a copy over a fast link must still be seen
            ax.broken_barh([(left, width)], (row_of[span.layer] + top, height), facecolors=COLOURS[kind], linewidth=0)
    if panel.first_token_s:
        ax.axvline(panel.first_token_s * 1e3, color="#222", linewidth=1.2, linestyle=(0, (4, 2)))
    ax.set_xlim(0, scale_ms)
    ax.set_ylim(len(row_of), 0)
    step = max(1, len(row_of) // 6)
    shown = panel.layers[::step]
    ax.set_yticks([row_of[layer] + 0.5 for layer in shown], [str(layer) for layer in shown])
    ax.set_xlabel("ms since the request")
    ax.set_ylabel("layer")
    note = textwrap.wrap(panel.note, NOTE_LETTERS)
    above = 8 + 14 * len(note)
    ax.set_title(panel.title, loc="left", fontsize=12, fontweight="bold", pad=above)
    if panel.first_token_s:  # above the panel, as anything inside would lie on some bar
        told = f"first token after {panel.first_token_s * 1e3:,.0f} ms"
        ax.annotate(told, (1, 1), (0, above), "axes fraction", "offset points", fontsize=10.5, ha="right")
    ax.annotate("\n".join(note), (0, 1), (0, 6), "axes fraction", "offset points", fontsize=9.5, color="#444")
    ax.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _kinds(panels: Sequence[Panel]) -> list[SpanKind]:
    """The kinds that appear, in the legend's order; waits first so that work is drawn over them."""
    present = {span.kind for panel in panels for span in panel.spans}
    return [kind for kind in COLOURS if kind in present]


def _ms(span: Span) -> tuple[float, float]:
    """(start, length) of a span."""
    return span.start_s * 1e3, (span.end_s - span.start_s) * 1e3


def _check(panels: Sequence[Panel]) -> None:
    if not any(panel.spans for panel in panels):
        raise Refused("nothing to draw: no panel holds a span (was the timeline off?)")


# ---- the page ----

_WIDTH, _LEFT, _ROW, _FOOT = 620, 34, 9, 34


def write_html(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Draw the panels to `path` as one page that needs nothing else. Raises Refused without spans."""
    _check(panels)
    scales = scales_ms(panels)
    legend = "".join(
        f'<label><input type="checkbox" checked id="{kind}"><i class="{kind}"></i>{WORDS[kind]}</label>'
        for kind in _kinds(panels)
    )
    figures = "".join(_figure(panel, scale) for panel, scale in zip(panels, scales, strict=True))
    page = Template((Path(__file__).parent / "timeline.html").read_text())
    kinds = "\n".join(_style(kind, colour) for kind, colour in COLOURS.items())
    path.write_text(
        page.substitute(title=html.escape(title), how=how_to_read(scales), legend=legend, figures=figures, kinds=kinds)
    )


def _style(kind: SpanKind, colour: str) -> str:
    """The colour of a kind, which is shown as long as its box in the legend is ticked."""
    shown = f".{kind}{{fill:{colour};background:{colour}}}"
    return f"{shown}body:has(#{kind}:not(:checked)) rect.{kind}{{display:none}}"


def _figure(panel: Panel, scale_ms: float) -> str:
    row_of = {layer: row for row, layer in enumerate(panel.layers)}
    height = _ROW * max(1, len(row_of))
    per_ms = _WIDTH / scale_ms if scale_ms else 0.0
    parts = [_axis(scale_ms, per_ms, height)]
    step = max(1, len(row_of) // 6)
    parts += [
        f'<text x="{_LEFT - 5}" y="{row_of[layer] * _ROW + _ROW - 1}" text-anchor="end">{layer}</text>'
        for layer in panel.layers[::step]
    ]
    for span in sorted(panel.spans, key=lambda span: list(COLOURS).index(span.kind), reverse=True):
        left, width = _ms(span)
        top, tall = LANES.get(span.kind, COPY_LANE)
        moved = f", {span.nbytes:,} bytes" if span.nbytes else ""
        tip = f"layer {span.layer}: {WORDS[span.kind]}, {left:.1f} to {left + width:.1f} ms ({width:.2f} ms{moved})"
        parts.append(
            f'<rect class="{span.kind}" x="{_LEFT + left * per_ms:.2f}" y="{(row_of[span.layer] + top) * _ROW:.2f}" '
            f'width="{max(width * per_ms, 1.5):.2f}" height="{tall * _ROW:.2f}">'
            f"<title>{html.escape(tip)}</title></rect>"
        )
    if panel.first_token_s:
        at = _LEFT + panel.first_token_s * 1e3 * per_ms
        parts.append(f'<line class="first" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}"/>')
    answer = f"<b>{panel.first_token_s * 1e3:,.0f} ms</b> to the first token" if panel.first_token_s else ""
    box = f"0 0 {_LEFT + _WIDTH + 6} {height + _FOOT}"
    return (
        f"<figure><figcaption><h2>{html.escape(panel.title)}</h2><span>{answer}</span>"
        f'<p>{html.escape(panel.note)}</p></figcaption><svg viewBox="{box}" role="img" '
        f'aria-label="{html.escape(panel.title)}">{"".join(parts)}</svg></figure>'
    )


def _axis(scale_ms: float, per_ms: float, height: int) -> str:
    step = next((s * 10**e for e in range(-2, 8) for s in (1, 2, 5) if scale_ms / (s * 10**e) <= 8), scale_ms or 1.0)
    ticks = []
    for number in range(int(scale_ms / step) + 1):
        x = _LEFT + number * step * per_ms
        ticks.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        ticks.append(f'<text x="{x:.1f}" y="{height + 13}" text-anchor="middle">{number * step:g}</text>')
    ticks.append(f'<text x="{_LEFT + _WIDTH / 2}" y="{height + 28}" text-anchor="middle">ms since the request</text>')
    return "".join(ticks)
