"""What the scheduler side costs a step, without an engine. Prints a table; `--json PATH` writes the figures.

    python bench/bench_scheduler.py --json bench/results/scheduler.json

One group, blocks of 16 tokens; one thread. Looking up and ordering are serial before a forward, so each of these is
time that a request waits; names come while the forward runs, settling after it. A fresh request each round; a hit is
one by a request that was not seen before, except where "asked again" is said.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import layercast
from layercast.config import Config
from layercast.control.node import scheduler_side
from layercast.control.scheduler import SchedulerSide, WorkerFacts
from layercast.flow.orders import LoadEnd, LoadOrder, LoadOutcome, SaveOrder, SaveOutcome, StepReport
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.spec.keys import Identity

T = TypeVar("T")
BLOCK, LAYERS = 16, 28
SPEC = GroupSpec("full", GroupKind.FULL, BLOCK, tuple(range(LAYERS)))
IDENTITY = Identity(
    model="m",
    revision="main",
    weights_version="1",
    dtypes=(("kv", "bfloat16"),),
    layout="token-major",
    group="full",
    block_size=BLOCK,
)


class Bench:
    """One scheduler side, and the times of each thing it was asked to do, in seconds."""

    def __init__(self, slots: int) -> None:
        facts = WorkerFacts((SPEC,), (IDENTITY,), (slots,), (1,))
        self.side: SchedulerSide = scheduler_side([facts], Config(kv_recompute_threshold=0, host_bytes=1), False)
        self.times: dict[str, list[float]] = {}
        self.rng = random.Random(0)

    def timed(self, name: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        out = work()
        self.times.setdefault(name, []).append(time.perf_counter() - began)
        return out

    def saved(self, order: SaveOrder | None, name: str) -> None:
        if order is None:
            raise SystemExit(f"{name}: nothing was saved")
        report = StepReport(0, saves=(SaveOutcome(order.id, order.request, True, 1, LAYERS, 0),))
        self.timed(name, lambda: self.side.settle(report))

    def loaded(self, order: LoadOrder | None, name: str) -> None:
        if order is None:
            raise SystemExit(f"{name}: nothing was loaded")
        outcome = LoadOutcome(order.id, order.request, LoadEnd.LANDED, 1, LAYERS, True, 0.0, 0.0)
        self.timed(name, lambda: self.side.settle(StepReport(0, loads=(outcome,))))

    def round(self, nth: int, tokens: int, label: str) -> None:
        """A prompt is looked up, saved, looked up by another request, loaded, and goes on to be decoded."""
        side, blocks = self.side, tokens // BLOCK
        prompt = [self.rng.randrange(150_000) for _ in range(tokens + 1)]
        table = [[*range(1, blocks + 100)]]
        cold, warm = f"cold-{tokens}-{nth}", f"warm-{tokens}-{nth}"
        self.timed(f"{label}match {tokens} cold", lambda: side.match(prompt, None, 0, cold))
        order = self.timed(f"{label}save_order {blocks} fresh", lambda: side.save_order(cold, prompt, 0, tokens, table))
        self.timed(f"{label}name {blocks}, behind the forward", side.name)
        self.saved(order, f"{label}settle save {blocks}")
        self.timed(f"{label}match {tokens} hit", lambda: side.match(prompt, None, 0, warm))
        match = self.timed(f"{label}match {tokens} hit, asked again", lambda: side.match(prompt, None, 0, warm))
        load = self.timed(f"{label}load_order {blocks}", lambda: side.load_order(warm, match, table))
        self.loaded(load, f"{label}settle load {blocks}")
        for more in (1, 8, 1, 8):
            self.grow(warm, prompt, table, more, f"{label}save_order {more} at {tokens}")
        side.finish(cold)
        side.finish(warm)

    def grow(self, request: str, prompt: list[int], table: list[list[int]], blocks: int, name: str) -> None:
        """A request has computed some more blocks."""
        before = len(prompt) // BLOCK * BLOCK
        prompt += [self.rng.randrange(150_000) for _ in range(blocks * BLOCK)]
        order = self.timed(name, lambda: self.side.save_order(request, prompt, before, len(prompt), table))
        self.saved(order, name.replace("save_order", "settle save"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    micros: dict[str, dict[str, float]] = {}
    for label, slots in (("", 1 << 20), ("full slab: ", 4_000)):
        bench = Bench(slots)
        for nth in range(given.rounds):
            for tokens in (8_192, 30_000):
                bench.round(nth, tokens, label)
        for name, taken in bench.times.items():
            late = taken[2 + len(taken) // 4 :]  # warmed up, and the small slab full
            micros[name] = {"median": statistics.median(late) * 1e6, "p95": statistics.quantiles(late, n=20)[-1] * 1e6}
    for name, spread in micros.items():
        print(f"{name:42} {spread['median']:9.1f} us   p95 {spread['p95']:9.1f}")
    if given.json:
        figures = {
            "layercast": layercast.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {platform.system()}",
            "microseconds": micros,
        }
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
