"""Paired measurements: two things in turn, the ratio pair by pair, its median and a 95 % interval of that median."""

import json
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from layercast.bench.results import interval


def paired(first: Callable[[], float], second: Callable[[], float], pairs: int) -> dict[str, object]:
    """Seconds of `first` over seconds of `second`, alternating which goes first."""
    ours, theirs = [], []
    for number in range(pairs):
        turn = [(first, ours), (second, theirs)]
        for call, kept in turn if number % 2 == 0 else reversed(turn):
            kept.append(call())
    return {
        "pairs": pairs,
        **ratios_of(ours, theirs),
        "first_s_median": median(ours),
        "second_s_median": median(theirs),
    }


def ratios_of(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, object]:
    """Ours over theirs pair by pair: the middle one, the 95 % interval of that, and all of them."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "ratio_median": median(ratios),
        "ratio_95": list(interval(ratios)),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def about() -> dict[str, object]:
    """Versions, processor and command, to stand beside every figure."""
    packages = {}
    for name in ("layercast", "torch", "transformers", "numpy", "msgspec"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "source tree"
    models = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "packages": packages,
        "processor": models[0] if models else platform.processor(),
        "cores": len(models),
        "command": " ".join(["python", *sys.argv]),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def write(path: Path | None, results: dict[str, object]) -> None:
    """Results as JSON, to a file and to the screen; called after every case, so that a stop loses nothing."""
    text = json.dumps({"about": about(), **results}, indent=2)
    if path is not None:
        path.write_text(text + "\n")
    print(text)
