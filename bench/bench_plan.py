"""How long plans take to make, and how many pieces they have. Prints a table; `--json PATH` writes the figures.

    python bench/bench_plan.py --json bench/results/plan.json

Fragmentation is simulated, not assumed: two block pools that free a request's blocks in reverse order to the end of a
first-in-first-out queue, as vLLM's does, serve 128 live requests that come in chunks and end in random order.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

import layercast
from layercast.plan.pieces import Route, route_between
from layercast.spec.groups import Group, GroupKind, GroupSpec, layout_of
from layercast.spec.planes import PlaneKind, plane_of_tensor

BLOCK, HEADS, WIDTH = 16, 8, 256  # tokens, KV heads, K and V side by side
SPARE = 0.1  # of a pool's blocks, beyond what the live requests need
HELD = BLOCK * HEADS * WIDTH  # elements of one block in one layer


def group_of(layers: int, blocks: int, *, block_major: bool) -> Group:
    """bf16 KV planes, all layers of a block together or each layer by itself."""
    step, layer_step = (layers * HELD, HELD) if block_major else (HELD, blocks * HELD)
    planes = [
        plane_of_tensor(
            f"layers.{layer}.kv",
            layer,
            PlaneKind.KV,
            "bfloat16",
            2 * layer * layer_step,
            (blocks, HEADS, BLOCK, WIDTH),
            (step, BLOCK * WIDTH, WIDTH, 1),
            ("block", "head", "token", "content"),
        )
        for layer in range(layers)
    ]
    return layout_of([GroupSpec("full", GroupKind.FULL, BLOCK, tuple(range(layers)))], planes).groups[0]


def route_of(layers: int, blocks: int, *, block_major: bool) -> Route:
    group = group_of(layers, blocks, block_major=block_major)
    return route_between(group, group)


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after three that warm up."""
    taken = []
    for nth in range(repeats + 3):
        began = time.perf_counter()
        work()
        if nth >= 3:
            taken.append(time.perf_counter() - began)
    return taken


def spread(seconds: list[float], unit: float) -> dict[str, float]:
    low, *_, high = statistics.quantiles(seconds, n=20)
    return {"median": statistics.median(seconds) * unit, "p5": low * unit, "p95": high * unit, "runs": len(seconds)}


def plan_time(repeats: int, layers: int = 61, blocks: int = 1024) -> dict[str, object]:
    """A plan for scattered blocks, and the pieces of all its layers."""
    rng = random.Random(0)
    route = route_of(layers, 4 * blocks, block_major=False)
    source, target = (rng.sample(range(4 * blocks), blocks) for _ in range(2))
    plan = route.plan(source, target)

    def everything() -> None:
        made = route.plan(source, target)
        for layer in range(layers):
            made.layer(layer)

    return {
        "layers": layers,
        "blocks": blocks,
        "pieces_a_layer": len(plan.layer(0)),
        "all_ms": spread(timed(everything, repeats), 1e3),
        "plan_alone_ms": spread(timed(lambda: route.plan(source, target), repeats), 1e3),
        "one_layer_us": spread(timed(lambda: plan.layer(7), 5 * repeats), 1e6),
        "target": "all <= 5 ms, one layer <= 50 us",
    }


def contiguous(layers: int = 28, blocks: int = 63) -> dict[str, object]:
    """Contiguous blocks, block-major on both sides: pieces by window."""
    route = route_of(layers, 2 * blocks, block_major=True)
    plan = route.plan(range(blocks), range(3, 3 + blocks))
    pieces = {
        window: sum(len(plan.window(range(at, at + window))) for at in range(0, layers, window))
        for window in (28, 14, 7, 4, 2, 1)
    }
    return {"layers": layers, "blocks": blocks, "pieces_by_window": pieces, "target": "layers / window"}


class Pool:
    """A block pool that hands out the front of a queue and puts freed blocks, last first, at its end."""

    def __init__(self, blocks: int) -> None:
        self.free = deque(range(blocks))

    def take(self, count: int) -> list[int]:
        return [self.free.popleft() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self.free.extend(reversed(blocks))


def churn(seed: int, *, live: int, tokens: int, chunk: int, together: int, answer: int) -> Iterator[list[int]]:
    """Prompt blocks of each request in order of arrival, in a pool that serves `live` of them at a time.

    Prompts come in chunks, `together` of them by turns; every live request also grows by its answer, a block each
    `BLOCK` steps; the one that ends is drawn at random.
    """
    rng = random.Random(seed)
    need, most = tokens // BLOCK, -(-(tokens + answer) // BLOCK)
    pool = Pool(int(live * most * (1 + SPARE)))
    held: list[list[int]] = []
    while True:
        while len(held) + together > live:
            pool.give_back(held.pop(rng.randrange(len(held))))
        coming: list[list[int]] = [[] for _ in range(together)]
        while len(coming[-1]) < need:
            for request in coming:
                request.extend(pool.take(min(chunk // BLOCK, need - len(request))))
            for request in held:
                if len(request) < most:
                    request.extend(pool.take(1))
        yield from (request[:need] for request in coming)
        held += coming


def fragmented(seeds: int, layers: int = 28, live: int = 128, tokens: int = 10_240) -> dict[str, object]:
    """Pieces a transfer in bulk, each side's pool by itself, after `live` requests have warmed it up.

    Copies are what is left where a mover or wire has no strided runs: stretches that are contiguous on both sides.
    """
    variants = {
        "prompts one by one": {"together": 1, "answer": 0},
        "prompts by turns of 4": {"together": 4, "answer": 0},
        "prompts by turns of 4, answers of 256 tokens": {"together": 4, "answer": 256},
        "prompts by turns of 4, answers of 1024 tokens": {"together": 4, "answer": 1024},
    }
    out: dict[str, object] = {}
    for name, traffic in variants.items():
        most = int(live * -(-(tokens + traffic["answer"]) // BLOCK) * (1 + SPARE))
        route = route_of(layers, most, block_major=True)
        pieces, copies = [], []
        for seed in range(seeds):
            sides = [churn(2 * seed + side, live=live, tokens=tokens, chunk=2048, **traffic) for side in (0, 1)]
            for source, target in islice(zip(*sides, strict=True), live, 8 * live):
                plan = route.plan(source, target)
                window = plan.window(plan.layers)
                pieces.append(len(window))
                copies.append(int(window.count.sum()))
        out[name] = {"transfers": len(pieces), "pieces": counts(pieces), "copies": counts(copies)}
    return {
        "blocks_a_transfer": tokens // BLOCK,
        "spare_blocks": SPARE,
        **out,
        "public_table": "56 -> 1, 3528 -> 1, 34000 -> 422",
        "target": "<= 422 pieces a transfer",
    }


def counts(numbers: list[int]) -> dict[str, float]:
    return {
        "median": statistics.median(numbers),
        "p95": statistics.quantiles(numbers, n=20)[-1],
        "max": max(numbers),
        "share_within_422": sum(number <= 422 for number in numbers) / len(numbers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    figures = {
        "layercast": layercast.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "plan": plan_time(given.repeats),
        "contiguous": contiguous(),
        "fragmented": fragmented(given.seeds),
    }
    print(json.dumps(figures, indent=1))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
