"""Figures as bars: a panel a comparison, a bar a way of doing it, the limit as a line. Knows names and numbers only."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from layercast.errors import Refused

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, OTHERS, LIMIT = "#0072B2", "#B9B9B9", "#D55E00"


class Bars(msgspec.Struct, frozen=True):
    """One panel. unit: of the values; limit: the name whose value the others are held against, or none."""

    title: str
    unit: str
    values: Mapping[str, float]
    limit: str = ""


def write_bars(
    panels: Sequence[Bars], path: Path, title: str, ours: Sequence[str], limit: str = "what the others are held against"
) -> None:
    """Draw the panels one below the other as a PNG. ours: how the names of the bars to stand out begin.

    limit: what the legend calls the panels' limits. Raises Refused without panels or without matplotlib.
    """
    if not panels:
        raise Refused("nothing to draw: nothing was measured")
    save_png(lambda: figure_of(panels, title, tuple(ours), limit), path)


def save_png(draw: "Callable[[], Figure]", path: Path) -> None:
    """Write the figure that `draw` makes. Raises Refused without matplotlib."""
    try:
        draw().savefig(path)
    except ImportError as error:
        raise Refused("a PNG needs matplotlib: pip install '.[pictures]' in the clone") from error


def figure_of(panels: Sequence[Bars], title: str, ours: tuple[str, ...], limit: str) -> "Figure":
    """The picture, with a legend that names every colour in it."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(panel.values) + 1.5 for panel in panels]
    figure = Figure(figsize=(10, 1.2 + 0.3 * sum(heights)), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).ravel()
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel, ours)
    drawn = {_color(name, panel, ours) for panel in panels for name in panel.values}
    words = {OURS: "layercast", OTHERS: "others", LIMIT: limit}
    marks = [Patch(color=color, label=word) for color, word in words.items() if color in drawn]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _color(name: str, panel: Bars, ours: tuple[str, ...]) -> str:
    return OURS if name.startswith(ours) else LIMIT if name == panel.limit else OTHERS


def _draw(ax: "Axes", panel: Bars, ours: tuple[str, ...]) -> None:
    names, values = list(panel.values), list(panel.values.values())
    ax.barh(names, values, color=[_color(name, panel, ours) for name in names])
    for row, value in enumerate(values):
        ax.annotate(f"{value:.3g}", (value, row), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    if panel.limit in panel.values:
        ax.axvline(panel.values[panel.limit], color=LIMIT, linewidth=1.2, linestyle=(0, (4, 2)))
    ax.set_xlim(0, max(values) * 1.08)
    ax.invert_yaxis()
    ax.set_xlabel(panel.unit)
    ax.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    ax.tick_params(labelsize=9)
    ax.spines[["top", "right"]].set_visible(False)
