"""How a report is shown: tables on a terminal, bars in a picture, JSON. Knows plain values, no device."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table as Grid

from layercast.bench.results import HIGH, LOW, Report, Table
from layercast.observe.bars import Bars, write_bars

OURS = ("layercast", "layerwise", "gated graph, loading", "event", "flag")
"""How the names of what this package does begin."""


def grid_of(table: Table) -> Grid:
    """One row a way, one column a heading; an interval stands behind what lies in it."""
    headings = [heading for heading in table.headings if not heading.endswith((LOW, HIGH))]
    grid = Grid(
        title=table.title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False
    )
    grid.add_column("")
    for heading in headings:
        grid.add_column(heading, justify="right")
    for name, row in table.rows.items():
        style = "bold" if name.startswith(OURS) else None
        grid.add_row(name, *(_cell(row, heading) for heading in headings), style=style)
    return grid


def _cell(row: Mapping[str, float], heading: str) -> str:
    if heading not in row:
        return "-"
    ends = [figure(row[heading + end]) for end in (LOW, HIGH) if heading + end in row]
    return figure(row[heading]) + (f" ({'-'.join(ends)})" if ends else "")


def figure(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def write_terminal(report: Report, console: Console | None = None) -> None:
    """Every table, then what was compared bit for bit and what could not run."""
    console = console or Console()
    console.print(f"{report.card}; {', '.join(f'{name} {version}' for name, version in report.versions.items())}\n")
    for table in report.tables:
        console.print(grid_of(table))
        for name, why in table.absent.items():
            console.print(f"  {name}: {why}", highlight=False, markup=False)
        for name, line in table.timelines.items():
            first, last, waited = line.landed[0], line.landed[-1], sum(line.began) - sum(line.reached)
            console.print(
                f"  {name}, ms of one run: ordered {line.ordered:.2f}, landed {first:.2f} to {last:.2f}, "
                f"last layer began {line.began[-1]:.2f}, done {line.done:.2f}; waited {waited:.2f} at gates",
                highlight=False,
            )
        if table.note:
            console.print(table.note, style="italic", highlight=False)
        if table.checks:
            right = sum(table.checks.values())
            console.print(f"bit for bit as expected: {right} of {len(table.checks)}", highlight=False)
        console.print()
    for wrong in report.wrong:
        console.print(f"WRONG: {wrong}", style="bold red", highlight=False)


def write_picture(report: Report, path: Path) -> None:
    """The tables' bars as a PNG. Raises Refused without matplotlib."""
    panels = [
        Bars(
            table.title,
            table.bar,
            {name: row[table.bar] for name, row in table.rows.items() if table.bar in row},
            table.best,
        )
        for table in report.tables
    ]
    write_bars(panels, path, report.card, OURS)


def encoded(report: Report) -> bytes:
    """The report as JSON; four digits say all that was measured."""
    plain = msgspec.to_builtins(report)
    for table in plain["tables"]:
        table["rows"] = {
            name: {heading: float(f"{value:.4g}") for heading, value in row.items()}
            for name, row in table["rows"].items()
        }
    return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"
