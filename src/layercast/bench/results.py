"""What a measurement found, as plain values: tables of figures, each way of doing it a row. Knows no device."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from math import comb
from typing import TypeVar

import msgspec

T = TypeVar("T")
LOW, HIGH = ", low", ", high"
"""How the headings of an interval's ends go on behind that of what lies between them."""
Start = Callable[[], Callable[[], None]]
"""Starts something; what it returns waits for the end of it."""
SOON_S = 60.0


class What(StrEnum):
    """The measurements."""

    LAYERS = "layers"
    OVERLAP = "overlap"
    GRAPH = "graph"
    BUSY = "busy"
    PEER = "peer"


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One layerwise run, in ms from its start on; lists have an item a layer, as the device's clock has it.

    ordered: the call that ordered all loads has returned (the host's clock). landed: the layer's copies. reached: the
    forward stood before its gate; began: it was let through. done: the forward.
    """

    ordered: float
    landed: tuple[float, ...]
    reached: tuple[float, ...]
    began: tuple[float, ...]
    done: float


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison, all of it measured in one run, the ways in turn.

    rows: for each way its figures by heading, units in the heading. bar: the heading that the picture shows; best:
    the way that is the limit. checks: what was compared bit for bit. absent: rivals that could not run, and why.
    timelines: for some ways, of one run, when what happened in each layer.
    """

    title: str
    rows: Mapping[str, Mapping[str, float]]
    bar: str
    best: str = ""
    checks: Mapping[str, bool] = {}
    absent: Mapping[str, str] = {}
    timelines: Mapping[str, "Timeline"] = {}
    note: str = ""

    @property
    def headings(self) -> tuple[str, ...]:
        """All headings, in the order in which they first appear."""
        return tuple(dict.fromkeys(heading for row in self.rows.values() for heading in row))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `layercast bench` prints and writes. took_s: the measuring itself."""

    command: str
    card: str
    versions: Mapping[str, str]
    tables: tuple[Table, ...]
    took_s: float

    @property
    def wrong(self) -> tuple[str, ...]:
        """The checks that failed."""
        return tuple(f"{table.title}: {name}" for table in self.tables for name, ok in table.checks.items() if not ok)


def median(values: Sequence[float]) -> float:
    """The middle one, as a float."""
    return float(statistics.median(values))


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, least and most under headings that begin with `name`, and how many there were."""
    return {name: median(values), "least": min(values), "most": max(values), "runs": float(len(values))}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics that hold the median with at least 95 % probability (binomial; needs 6 values or more)."""
    ranked, n = sorted(values), len(values)
    tail, low = 0.0, 0
    while tail + comb(n, low) / 2**n <= 0.025:
        tail += comb(n, low) / 2**n
        low += 1
    low = max(0, low - 1)
    return ranked[low], ranked[n - 1 - low]


def ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median of ours over theirs round by round, and its 95 % interval, under headings that begin with `name`."""
    found = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, high = interval(found)
    return {name: median(found), name + LOW: low, name + HIGH: high}


def in_turn(ways: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """What every way returned in `repeats` rounds, the ways in turn, forth and back; a first round warms up."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for nth in range(repeats + 1):
        for name in list(ways)[:: 1 if nth % 2 else -1]:
            value = ways[name]()
            if nth:
                found[name].append(value)
    return found


def timed_in_turn(
    ways: Mapping[str, Start], repeats: int, synchronize: Callable[[], None]
) -> dict[str, list[tuple[float, float]]]:
    """What `timed` tells of every way, the ways in turn."""
    return in_turn({name: partial(timed, start, synchronize) for name, start in ways.items()}, repeats)


def rates(runs: Sequence[tuple[float, float]], nbytes: int, layers: int) -> dict[str, float]:
    """Figures of copies that `timed` has timed; nbytes: of all layers."""
    whole = [ms for _, ms in runs]
    host = median([ms for ms, _ in runs])
    return {"GB/s": nbytes / median(whole) / 1e6, "host us a layer": host * 1e3 / layers, **spread("ms", whole)}


def timed(start: Start, synchronize: Callable[[], None]) -> tuple[float, float]:
    """(ms on the calling thread, ms until the end) of one run from a quiet device on."""
    synchronize()
    began = time.perf_counter()
    finish = start()
    called = time.perf_counter()
    finish()
    return (called - began) * 1e3, (time.perf_counter() - began) * 1e3
