"""What the CUDA mover and gates cost and reach on this machine's GPUs: every `layercast bench`, by importance.

    python bench/bench_gpu.py --json bench/results/gpu_h200.json [--only layers,overlap,...] [--limit 300]

Writes the JSON after every table, and a picture of each case into a folder. A case that ends its process, or outlasts
the limit, costs the others nothing. Without a GPU it says so and ends well.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from layercast.bench.command import Options, machine, run
from layercast.bench.report import encoded, write_picture, write_terminal
from layercast.bench.results import Report, What
from layercast.errors import Refused

HIT, SHORT = (8192, 512), (2048, 256)
CASES = {
    "layers": Options(what=What.LAYERS),
    "overlap": Options(what=What.OVERLAP, lengths=((8192, 2048), HIT, (32768, 1024), SHORT)),
    "graph": Options(what=What.GRAPH, lengths=((8192, 2048), HIT)),
    "overlap of blocks of 64": Options(what=What.OVERLAP, block=64, lengths=(HIT,), brief=True),
    "overlap of blocks of 128": Options(what=What.OVERLAP, block=128, lengths=(HIT,), brief=True),
    "layers of blocks of 64": Options(what=What.LAYERS, block=64, brief=True),
    "layers of blocks of 128": Options(what=What.LAYERS, block=128, brief=True),
    "busy": Options(what=What.BUSY, lengths=(HIT,)),  # minutes
    "long": Options(what=What.OVERLAP, lengths=((131072, 1024),), brief=True),
    "peer": Options(what=What.PEER),
}
ALONE = ("layers", "graph")
"""The one brings rivals in, the other takes more hardware queues of the process."""
NO_GPU = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--pictures", type=Path, help="folder; beside the JSON if not given")
    parser.add_argument("--only", default=",".join(CASES), help="cases, in order")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which nothing more is measured")
    parser.add_argument("--here", action="store_true", help="in this process")
    given = parser.parse_args()
    given.pictures = given.pictures or given.json.with_suffix("")
    todo = given.only.split(",")
    if unknown := set(todo) - set(CASES):
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    return measure(todo, given) if given.here else supervise(todo, given)


def supervise(todo: list[str], given: argparse.Namespace) -> int:
    """Measure in processes, a new one after each that failed, and one for each that is ALONE."""
    found: dict[str, object] = {"command": f'python bench/bench_gpu.py --only "{given.only}" --repeats {given.repeats}'}
    keep(found, given.json)
    worst, deadline = 0, time.monotonic() + given.limit
    while todo and time.monotonic() < deadline:
        group = todo[:1] if todo[0] in ALONE else [name for name in todo if name not in ALONE]
        options = ["--json", given.json, "--pictures", given.pictures, "--repeats", str(given.repeats), "--here"]
        command = [sys.executable, __file__, "--only", ",".join(group), *options]
        try:
            ended = subprocess.run(command, check=False, timeout=deadline - time.monotonic()).returncode
        except subprocess.TimeoutExpired:
            print(f"the limit of {given.limit:g} s is over; of {todo} some are not measured", file=sys.stderr)
            break
        if ended == NO_GPU:
            given.json.unlink()
            return 0
        found = json.loads(given.json.read_text())
        if ended:  # in the first that is not there, or not whole
            worst, wrong = ended, next((name for name in group if not whole(found.get(name))), group[-1])
            found.setdefault(wrong, f"failed with {ended}")
            keep(found, given.json)
            group = group[: group.index(wrong) + 1]
        todo = [name for name in todo if name not in group]
    return worst


def whole(case: object) -> bool:
    """Whether a case was measured to its end, or could not be."""
    return isinstance(case, str) or (isinstance(case, dict) and bool(case.get("whole")))


def measure(names: list[str], given: argparse.Namespace) -> int:
    """Measure in this process. 1 where something was not bit equal."""
    found, wrong = json.loads(given.json.read_text()) if given.json.exists() else {}, False
    try:
        machine(What.GRAPH if "graph" in names else What.LAYERS)  # what a process has of queues it has for good
    except Refused as error:
        print(error, file=sys.stderr)
        return NO_GPU
    for name in names:
        print(f"== {name}", flush=True)
        try:
            report = run(replace(CASES[name], repeats=given.repeats), say, partial(note, found, name, given.json))
        except Refused as error:
            some = found.get(name)
            found[name] = some | {"refused": str(error), "whole": True} if some else f"not measured: {error}"
        else:
            found[name]["whole"] = True
            wrong |= bool(report.wrong)
            write_terminal(report)
            given.pictures.mkdir(parents=True, exist_ok=True)
            write_picture(report, given.pictures / f"{name.replace(' ', '_')}.png")
        keep(found, given.json)
    return int(wrong)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def note(found: dict[str, object], name: str, path: Path, report: Report) -> None:
    """Keep what there is of a case."""
    found[name] = json.loads(encoded(report))
    keep(found, path)


def keep(found: dict[str, object], path: Path) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(found, indent=1) + "\n")
    fresh.replace(path)


if __name__ == "__main__":
    sys.exit(main())
