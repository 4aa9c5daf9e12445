"""What the worker's steps cost the engine's thread, and the process in all, over a device that moves nothing.

    python bench/bench_worker.py [--json PATH] [--profile CASE]

The real worker, issuer, CUDA mover and gates, over driver calls that return at once: what is left is our own time.
Llama-3.1-8B's shape: 32 layers, one group, blocks of 16 tokens.
"""

import argparse
import cProfile
import ctypes
import json
import pstats
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from layercast.config import Config
from layercast.flow.batches import Ways
from layercast.flow.orders import BlockPairs, LoadOrder, SaveOrder, StepOrders
from layercast.flow.worker import Worker
from layercast.move.costs import Way, only
from layercast.move.cuda import CudaMover
from layercast.move.cuda_driver import DEVICE, HOST, Calls, libc
from layercast.move.cuda_gates import CudaGate
from layercast.move.cuda_pin import Pinning
from layercast.spec.groups import GroupKind, GroupSpec, layout_of
from layercast.spec.planes import PlaneKind, plane_of_tensor
from layercast.store.slab import Slab

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "move")]
from host_device import KERNEL, HostDevice  # noqa: E402

LAYERS, BLOCKS, WORDS = 32, 8192, 16


class NullDevice(HostDevice):
    """Calls of the driver that do nothing, but for the words that a device would write.

    handed: ns of `time.monotonic` at which it was called for copies first since that was 0, and last.
    """

    def __init__(self) -> None:
        super().__init__()
        from numba import carray, cfunc, types

        self.handed = np.zeros(2, np.int64)
        at, fetch, clock = (
            self.handed.ctypes.data,
            libc("memcpy", 3, keeping=True),
            libc("clock_gettime", 2, keeping=True),
        )

        def nothing(arguments: int):
            names = ", ".join(f"a{n}" for n in range(arguments))
            scope: dict = {}
            exec(f"def call({names}):\n    return 0", scope)
            return cfunc(types.int32(*[types.int64] * arguments))(scope["call"]).ctypes

        @cfunc(types.int32(types.int64, types.CPointer(types.uint32), types.int64, types.int64))
        def write(_stream, word, value, _flags):
            carray(word, 1)[0] = value & 0xFFFFFFFF
            return 0

        @cfunc(types.int32(*[types.int64] * 8))
        def copies(_to, _from, _sizes, _count, _attributes, _index, _one, _stream):
            now, handed = np.empty(2, np.int64), np.empty(2, np.int64)
            clock(time.CLOCK_MONOTONIC, now.ctypes.data)
            fetch(handed.ctypes.data, at, 16)
            handed[1] = 1_000_000_000 * now[0] + now[1]
            handed[0] = handed[0] or handed[1]
            fetch(at, handed.ctypes.data, 16)
            return 0

        self._kept = write, copies
        written = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 4)(write.address)
        noted = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 8)(copies.address)
        sizes = {"copy": 4, "record": 2, "wait": 3, "sleep": 1, "finish": 1, "launch": 11, "hold": 4}
        self.calls = Calls(**{name: nothing(n) for name, n in sizes.items()}, write=written, copy_batch=noted)


def opened(block_major: bool, staged: bool = False):
    """(worker, engine's pools): the worker over memory that counts as a device's."""
    device = NullDevice()
    pool = np.zeros((LAYERS, BLOCKS, WORDS), np.int32)
    step = (LAYERS * WORDS, WORDS) if block_major else (WORDS, BLOCKS * WORDS)
    planes = [
        plane_of_tensor(
            f"layers.{n}", n, PlaneKind.KV, "int32", pool.ctypes.data + 4 * n * step[1], (BLOCKS, WORDS), (step[0], 1),
            ("block", "content"),
        )
        for n in range(LAYERS)
    ]  # fmt: skip
    layout = layout_of([GroupSpec("full", GroupKind.FULL, 16, tuple(range(LAYERS)))], planes)
    config = Config(host_bytes=4 * LAYERS * BLOCKS * WORDS, verify=False, layerwise_prefetch_layers=2)
    slab = Slab.create(layout, config.host_bytes)
    device.memory[pool.ctypes.data] = (DEVICE, pool.nbytes, pool)
    owner = np.frombuffer(slab.owner, np.uint8)
    device.memory[owner.ctypes.data] = (HOST, owner.nbytes, owner)
    mover = CudaMover(device, KERNEL if staged else None, current_stream=lambda: 7)
    pinning = Pinning(device, owner.ctypes.data, owner.nbytes)
    pinning.wait(30)
    mover.follow(pinning)
    if staged:
        mover.prefer(only(Way.STAGED))
    ways = Ways.between(layout, slab, config, on_device=True)
    return Worker(ways, mover, CudaGate(device, lambda: 7), keep=(pool,)), mover


class Steps:
    """Orders of each case, over slots and blocks as an engine's allocator scatters them."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.number, self.choose = worker, 0, random.Random(1)
        self.room, self.at = min(worker.ways.slots[0], BLOCKS), 0

    def pairs(self, count: int, scattered: bool = False):
        """Blocks side by side, as a fresh engine's are; one after another, so that a step names none twice."""
        if scattered:
            slots, blocks = (tuple(self.choose.sample(range(most), count)) for most in (self.room, BLOCKS))
            return (BlockPairs(0, slots, blocks),)
        self.at = self.at if self.at + 2 * count < self.room else 0
        first = at = self.at
        self.at += count + 1
        return (BlockPairs(0, tuple(range(at, at + count)), tuple(reversed(range(first, first + count)))),)

    def name(self) -> str:
        self.number += 1
        return f"r{self.number}"

    def load(self, count: int, scattered: bool):
        return LoadOrder(f"load-{self.number}", self.name(), 16 * count, self.pairs(count, scattered))

    def save(self, count: int):
        return SaveOrder(f"save-{self.number}", self.name(), self.pairs(count))

    def step(self, loads=(), saves=(), hooks=True, scattered=False):
        """Seconds of each part on the calling thread; of loads alone also those until the first copy is handed over,
        and from the last one until the host is told that all is over."""
        worker, clock = self.worker, time.perf_counter
        orders = StepOrders(
            self.number, tuple(self.load(n, scattered) for n in loads), tuple(self.save(n) for n in saves)
        )
        handed = worker.mover.driver.handed
        handed[:] = 0
        began, start, spent = time.monotonic_ns(), clock(), {}
        step = worker.begin(orders, after=(worker.mover.mark(),))
        spent["begin"] = clock() - start
        if loads and not saves:
            worker.quiet(30)
            told = time.monotonic_ns()
            spent["first copy"], spent["told"] = (int(handed[0]) - began) / 1e9, (told - int(handed[1])) / 1e9
        waited = written = 0.0
        for layer in range(LAYERS) if hooks else ():
            start = clock()
            step.wait(layer)
            middle = clock()
            step.written(layer)
            waited, written = waited + middle - start, written + clock() - middle
        spent["wait"], spent["written"] = waited, written
        if not hooks and loads:
            for layer in range(LAYERS):
                step.wait(layer)
        start = clock()
        report = step.end()
        spent["end"] = clock() - start
        ended = len(report.saves) + len(report.loads)
        worker.quiet(30)
        start = clock()
        ended += len((late := worker.report(-1)).saves) + len(late.loads)
        spent["report"] = clock() - start
        assert ended == len(loads) + len(saves)
        return spent


CASES = {
    "save of 512 blocks": {"saves": [512]},
    "save of 512 blocks, swept": {"saves": [512], "hooks": False},
    "hit of 512 blocks, save of 32": {"loads": [512], "saves": [32]},
    "hit of 1875 blocks, save of 64": {"loads": [1875], "saves": [64]},
    "256 saves of 1 block, swept": {"saves": [1] * 256, "hooks": False},
    "32 saves of 1 block, swept": {"saves": [1] * 32, "hooks": False},
    "1 save of 1 block, swept": {"saves": [1], "hooks": False},
    **{f"{n} scattered blocks": {"loads": [n], "scattered": True} for n in (128, 512, 2048)},
}


def measured(steps: Steps, case: dict, repeats: int) -> dict[str, object]:
    """Medians in microseconds, but the least of what other threads have a part in.

    `all threads` is the processor time of the whole process, to the report.
    """
    rows, cpu, wall = [], [], []
    for nth in range(repeats + 2):
        start, clock = time.process_time(), time.perf_counter()
        row = steps.step(**case)
        if nth >= 2:
            rows.append(row)
            cpu.append(time.process_time() - start)
            wall.append(time.perf_counter() - clock)
    chosen = {name: min if name in ("first copy", "told") else statistics.median for name in rows[0]}
    facts = {name: round(1e6 * choose([row[name] for row in rows]), 1) for name, choose in chosen.items()}
    return {
        **facts,
        "all_threads": round(1e6 * statistics.median(cpu), 1),
        "wall": round(1e6 * statistics.median(wall), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile")
    parser.add_argument("--block-major", action="store_true")
    parser.add_argument("--staged", action="store_true", help="by way of the staging buffer, whatever the pieces")
    args = parser.parse_args()
    worker, mover = opened(args.block_major, args.staged)
    steps = Steps(worker)
    if args.profile:
        case = CASES[args.profile]
        steps.step(**case)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(args.repeats):
            steps.step(**case)
        profile.disable()
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
    facts = {}
    for name, case in {} if args.profile else CASES.items():
        facts[name] = measured(steps, case, args.repeats)
        print(f"{name:34}", facts[name], flush=True)
    mover.close(10)
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
