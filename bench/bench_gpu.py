"""What the CUDA mover and gates cost and reach on one GPU, beside what they replace. Writes JSON after every case.

    python bench/bench_gpu.py --json bench/results/gpu_h100.json [--only layers,beside,...] [--repeats 15]

Shape: Llama-3.1-8B in bf16: 32 layers, blocks of 16 tokens, 64 KiB a block and layer. Slots and blocks are random
permutations, so nothing merges. Everything of a case is measured in one run, one way after another in turn.
Without a GPU it says so and ends well.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

# Streams that wait for flags must not share a hardware queue with those that set them.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

try:
    import torch
except ImportError:
    torch = None

if torch is None or not torch.cuda.is_available():
    print("bench_gpu: no CUDA device here; nothing measured")
    sys.exit(0)

import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import layercast
from layercast.move.cuda import CudaMover
from layercast.move.cuda_driver import Driver
from layercast.move.cuda_gates import CudaGate, FlagGate
from layercast.move.cuda_issue import compiled_issue, plain_issue
from layercast.move.cuda_pin import Pinning
from layercast.move.cuda_ways import DEFAULT_COSTS, Costs, Direction
from layercast.move.kernels.pieces import compiled
from layercast.plan.pieces import Pieces, route_between
from layercast.spec.groups import GroupKind, GroupSpec, layout_of
from layercast.spec.planes import PlaneKind, plane_of_tensor
from layercast.store.slab import Slab, slab_bytes

LAYERS, HEADS, QUERY_HEADS, WIDTH, BLOCK, HIDDEN, INNER = 32, 8, 32, 128, 16, 4096, 14336
BLOCK_BYTES = 2 * BLOCK * HEADS * WIDTH * 2
SOON_S = 60.0
FORCED = {
    "engine": {d: Costs(50.0, 0.0, 1e9, 1e-6) for d in Direction},
    "staged": {d: Costs(50.0, 1e6, 0.0, 1e-6) for d in Direction},
    "kernel": {d: Costs(50.0, 1e6, 1e9, 50.0) for d in Direction},
    "auto": DEFAULT_COSTS,
}


def median(values: list[float]) -> float:
    return float(statistics.median(values))


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "most": max(values), "n": len(values)}


class Bench:
    """The device, the memory on both sides, and what moves between them."""

    def __init__(self, tokens: int, repeats: int) -> None:
        self.repeats = repeats
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        self.driver = Driver(0)
        self.kernel = compiled(0)
        self.compute = torch.cuda.Stream()
        self.copying = torch.cuda.Stream(priority=-1)
        began = time.perf_counter()
        self.issues = {
            "compiled": compiled_issue(self.driver.calls, self.driver.batch_attributes),
            "plain": plain_issue(self.driver.calls, self.driver.batch_attributes),
        }
        self.compile_s = time.perf_counter() - began
        self.reserve(tokens)

    def reserve(self, tokens: int) -> None:
        """Pools on the device and a pinned slab for so many tokens."""
        self.blocks = tokens // BLOCK
        pool_blocks = self.blocks + self.blocks // 4
        shape = (pool_blocks, BLOCK_BYTES // 2)
        self.pools = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
        planes = [
            plane_of_tensor(
                f"layers.{n}", n, PlaneKind.KV, "bfloat16", pool.data_ptr(), shape, (shape[1], 1), ("block", "content")
            )
            for n, pool in enumerate(self.pools)
        ]
        spec = GroupSpec("full", GroupKind.FULL, BLOCK, tuple(range(LAYERS)))
        self.layout = layout_of([spec], planes)
        began = time.perf_counter()
        self.slab = Slab.create(self.layout, slab_bytes(self.layout, (self.blocks,)))
        faulted = time.perf_counter()
        self.slab_base = np.frombuffer(self.slab.owner, np.uint8).ctypes.data
        self.pinning = Pinning(self.driver, self.slab_base, len(self.slab.owner))
        self.pinning.wait(SOON_S)
        assert not self.pinning.refusal, self.pinning.refusal
        self.pin_times = {
            "bytes": len(self.slab.owner),
            "fault_s": faulted - began,
            "pin_s": time.perf_counter() - faulted,
        }
        ours, theirs = self.slab.layout.groups[0], self.layout.groups[0]
        self.loading, self.saving = route_between(ours, theirs), route_between(theirs, ours)
        choose = np.random.default_rng(0)
        self.ids = choose.permutation(pool_blocks)[: self.blocks]
        self.slots = choose.permutation(self.blocks)
        self.host = np.frombuffer(self.slab.owner, np.int32)
        self.host[:] = choose.integers(-(2**31), 2**31, len(self.host), np.int32)

    def release(self) -> None:
        """Give the slab and the pools back."""
        del self.host
        self.pinning.close(SOON_S)
        self.pools = []
        gc.collect()
        self.slab.close()
        torch.cuda.empty_cache()

    def mover(self, issue: str = "compiled", way: str = "auto", **options: Any) -> CudaMover:
        mover = CudaMover(self.driver, self.kernel, self.issues[issue], **options)
        mover.prefer(FORCED[way])
        mover.cut_at(self.pinning.cuts)
        return mover

    def lists(self, *, up: bool, blocks: int | None = None, half: bool = False) -> list[Pieces]:
        """The step's pieces, layer by layer; half: K and V of a block as two pieces each, as engines lay them out."""
        ids, slots = self.ids[:blocks], self.slots[:blocks]
        plan = self.loading.plan(slots, ids) if up else self.saving.plan(ids, slots)
        lists = [plan.layer(layer) for layer in range(LAYERS)]
        return [halves(pieces) for pieces in lists] if half else lists

    def wanted(self, layer: int, slots: np.ndarray) -> np.ndarray:
        """What the slots hold of one layer, int32 [slots, words]."""
        base = (self.slab.layout.groups[0].planes_of(layer)[0].base - self.slab_base) // 4
        words = BLOCK_BYTES // 4
        return self.host[base : base + self.blocks * words].reshape(self.blocks, words)[slots]

    def arrived(self) -> bool:
        """Whether every block of the first, a middle and the last layer is what its slot holds, bit for bit."""
        ids = torch.from_numpy(self.ids).cuda()
        return all(
            np.array_equal(self.pools[n].view(torch.int32)[ids].cpu().numpy(), self.wanted(n, self.slots))
            for n in (0, 17, LAYERS - 1)
        )

    def contiguous(self, *, up: bool) -> Callable[[], None]:
        """The limit: a long copy a layer, from and to pinned memory."""
        step = self.blocks * BLOCK_BYTES

        def run() -> None:
            for n, pool in enumerate(self.pools):
                ends = (pool.data_ptr(), self.slab_base + n * step)
                to, from_ = ends if up else ends[::-1]
                for first, last in self._unbroken(self.slab_base + n * step, step):
                    code = self.driver.calls.copy(to + first, from_ + first, last - first, self.copying.cuda_stream)
                    assert code == 0, code

        return run

    def _unbroken(self, host: int, nbytes: int) -> list[tuple[int, int]]:
        inside = [at - host for at in self.pinning.cuts if host < at < host + nbytes]
        ends = [0, *inside, nbytes]
        return list(pairwise(ends))


def halves(pieces: Pieces) -> Pieces:
    """Every piece as two of half the length, the second half of the target elsewhere in the same pool's block."""
    length = np.repeat(pieces.length // 2, 2)
    second = np.tile([0, 1], len(pieces)) * length
    # The two halves swap places on the device side, so that they can't merge there.
    source, target = np.repeat(pieces.source, 2) + second, np.repeat(pieces.target, 2) + (length - second)
    one = np.ones_like(length)
    return Pieces(source, target, length, one, one * 0, one * 0)


def timed(bench: Bench, run: Callable[[], Callable[[], None]]) -> tuple[float, float]:
    """(ms on the calling thread, ms until all is in place) of one run; `run` returns what waits for the end."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    finish = run()
    called = time.perf_counter()
    finish()
    return (called - began) * 1e3, (time.perf_counter() - began) * 1e3


def in_turn(bench: Bench, ways: dict[str, Callable[[], Callable[[], None]]], repeats: int) -> dict[str, Any]:
    """Every way `repeats` times, one after the other in turn, after one that warms up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for nth in range(repeats + 1):
        for name, run in ways.items():
            took = timed(bench, run)
            if nth:
                times[name].append(took)
    return {
        name: {"host_us_a_layer": median([h for h, _ in t]) * 1e3 / LAYERS, "ms": spread([w for _, w in t])}
        for name, t in times.items()
    }


def landing(flights: list[Any]) -> Callable[[], None]:
    return lambda: flights[-1].wait(SOON_S)


def case_layers(bench: Bench) -> dict[str, Any]:  # noqa: C901  one way of copying after another
    """8,192 tokens between scattered blocks and scattered slots."""
    found: dict[str, Any] = {}
    movers = {name: bench.mover("compiled", name) for name in ("auto", "staged", "kernel")}
    plain = bench.mover("plain", "auto")
    nbytes = LAYERS * bench.blocks * BLOCK_BYTES
    for up in (True, False):
        lists = bench.lists(up=up)
        ids = torch.from_numpy(bench.ids).cuda()
        staging = torch.empty_like(bench.pools[0][: bench.blocks])
        pinned = torch.empty(staging.shape, dtype=staging.dtype, pin_memory=True)
        contiguous = bench.contiguous(up=up)

        def limit(contiguous: Callable[[], None] = contiguous) -> Callable[[], None]:
            contiguous()
            return bench.copying.synchronize

        def one_a_block(lists: list[Pieces] = lists) -> Callable[[], None]:
            stream, copy = bench.copying.cuda_stream, bench.driver.calls.copy
            for pieces in lists:
                for to, from_, length in zip(
                    *(c.tolist() for c in (pieces.target, pieces.source, pieces.length)), strict=True
                ):
                    copy(to, from_, length, stream)
            return bench.copying.synchronize

        def index_copy(up: bool = up, ids: Any = ids, staging: Any = staging, pinned: Any = pinned) -> Callable:
            with torch.cuda.stream(bench.copying):
                for pool in bench.pools:
                    if up:
                        staging.copy_(pinned, non_blocking=True)
                        pool.index_copy_(0, ids, staging)
                    else:
                        torch.index_select(pool, 0, ids, out=staging)
                        pinned.copy_(staging, non_blocking=True)
            return bench.copying.synchronize

        ways: dict[str, Any] = {"contiguous": limit, "index_copy (contiguous host)": index_copy}
        for name, mover in movers.items():
            ways[f"ours {name}"] = lambda m=mover, x=lists: landing(m.submit_all(x))
        ways["ours auto, plain loop"] = lambda x=lists: landing(plain.submit_all(x))
        ways["ours auto, a submit a layer"] = lambda x=lists: landing([movers["auto"].submit(part) for part in x])
        split = bench.lists(up=up, half=True)
        for name, mover in movers.items():
            ways[f"ours {name}, 32 KiB pieces"] = lambda m=mover, x=split: landing(m.submit_all(x))
        result = in_turn(bench, ways, bench.repeats)
        result |= in_turn(bench, {"one copy a block": one_a_block}, 3)
        for values in result.values():
            values["gbps"] = nbytes / values["ms"]["median"] / 1e6
            values["of_contiguous"] = result["contiguous"]["ms"]["median"] / values["ms"]["median"]
        found["up" if up else "down"] = result
    for name, mover in movers.items():
        for pool in bench.pools:
            pool.zero_()
        torch.cuda.synchronize()
        mover.submit_all(bench.lists(up=True))[-1].wait(SOON_S)
        found[f"bit equal up, {name}"] = bench.arrived()
        kept = bench.host.copy()
        bench.host[:] = 0
        mover.submit_all(bench.lists(up=False))[-1].wait(SOON_S)
        found[f"bit equal down, {name}"] = bool(np.array_equal(kept, bench.host))
        bench.host[:] = kept
        mover.close(SOON_S)
    plain.close(SOON_S)
    return found


def case_beside(bench: Bench) -> dict[str, Any]:  # noqa: C901  one way of copying after another
    """Copies beside saturating matrix products, and what they cost those."""
    a = torch.randn(2048, HIDDEN, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(HIDDEN, INNER, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(2048, INNER, device="cuda", dtype=torch.bfloat16)
    movers = {name: bench.mover("compiled", name) for name in ("auto", "staged", "kernel")}
    nbytes = LAYERS * bench.blocks * BLOCK_BYTES
    products = 500

    def events() -> tuple[Any, Any]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def round_of(side: Callable[[], Any] | None) -> tuple[float, float]:
        torch.cuda.synchronize()
        first, last = events()
        with torch.cuda.stream(bench.compute):
            for _ in range(5):
                torch.mm(a, w, out=out)
            first.record()
        copied = 0.0
        thread = None
        if side is not None:
            side_ready = threading.Event()

            def copy() -> None:
                nonlocal copied
                side_ready.set()
                began = time.perf_counter()
                finish = side()
                finish()
                copied = time.perf_counter() - began

            thread = threading.Thread(target=copy)
            thread.start()
            side_ready.wait()
        with torch.cuda.stream(bench.compute):
            for _ in range(products):
                torch.mm(a, w, out=out)
            last.record()
        if thread is not None:
            thread.join()
        torch.cuda.synchronize()
        return first.elapsed_time(last), copied * 1e3

    found: dict[str, Any] = {}
    for up in (True, False):
        contiguous = bench.contiguous(up=up)
        lists, split = bench.lists(up=up), bench.lists(up=up, half=True)

        def limit(contiguous: Callable[[], None] = contiguous) -> Callable[[], None]:
            for _ in range(3):
                contiguous()
            return bench.copying.synchronize

        sides: dict[str, Any] = {"alone": None, "contiguous": limit}
        for name, mover in movers.items():
            sides[f"ours {name}"] = lambda m=mover, x=lists: landing([m.submit_all(x) for _ in range(3)][-1])
        sides["ours auto, 32 KiB pieces"] = lambda x=split: landing(
            [movers["auto"].submit_all(x) for _ in range(3)][-1]
        )
        sides["ours staged, 32 KiB pieces"] = lambda x=split: landing(
            [movers["staged"].submit_all(x) for _ in range(3)][-1]
        )
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for nth in range(bench.repeats + 1):
            for name, side in sides.items():
                took = round_of(side)
                if nth:
                    times[name].append(took)
        alone = median([t[0] for t in times["alone"]])
        result = {}
        for name, took in times.items():
            ms, copied = median([t[0] for t in took]), median([t[1] for t in took])
            result[name] = {
                "products_ms": ms,
                "slowdown_percent": (ms / alone - 1) * 100,
                "copy_ms": copied,
                "gbps": 3 * nbytes / copied / 1e6 if copied else 0.0,
                # Where the copies end before the products do, the slow-down of the time they shared.
                "slowdown_while_copying_percent": (ms - alone) / min(copied, ms) * 100 if copied else 0.0,
            }
        for values in result.values():
            values["of_contiguous"] = values["gbps"] / result["contiguous"]["gbps"]
        found["up" if up else "down"] = result
    for mover in movers.values():
        mover.close(SOON_S)
    return found


def case_gate(bench: Bench) -> dict[str, Any]:
    """From the end of a copy to the start of what waits for it, by an event and by a flag."""
    host = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    pool = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    gate = FlagGate(bench.driver, 1)
    found = {}
    for by in ("event", "flag"):
        times, calls = [], []
        for _ in range(200):
            torch.cuda.synchronize()
            copied, started = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            done = torch.cuda.Event()
            gate.arm({0: 1})
            with torch.cuda.stream(bench.copying):
                torch.cuda._sleep(100_000)
                pool.copy_(host, non_blocking=True)
                copied.record()
                if by == "event":
                    done.record()
                else:
                    bench.driver.stream_writes_value(bench.copying.cuda_stream, gate.flag(0), 1)
            began = time.perf_counter()
            with torch.cuda.stream(bench.compute):
                if by == "event":
                    bench.compute.wait_event(done)
                else:
                    gate.capture_wait(0, bench.compute.cuda_stream)
                calls.append(time.perf_counter() - began)
                started.record()
            torch.cuda.synchronize()
            gate.reset()
            times.append(copied.elapsed_time(started) * 1e3)
        found[by] = {"open_to_start_us": spread(times[20:]), "host_us": median(calls) * 1e6}
    gate.close()
    return found


class Forward:
    """A Llama-3.1-8B-shaped forward over random weights. After a layer's gate it reads a word of every loaded block."""

    def __init__(self) -> None:
        def weights(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.01

        self.weights = [
            (
                weights(HIDDEN, (QUERY_HEADS + 2 * HEADS) * WIDTH),
                weights(QUERY_HEADS * WIDTH, HIDDEN),
                weights(HIDDEN, 2 * INNER),
                weights(INNER, HIDDEN),
            )
            for _ in range(LAYERS)
        ]

    def prepare(self, bench: Bench, cached: int, new: int) -> None:
        self.new, self.cached = new, cached
        self.x = torch.randn(new, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.k = torch.randn(1, QUERY_HEADS, cached + new, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.v = torch.randn_like(self.k)
        words = BLOCK_BYTES // 4
        self.at = torch.from_numpy(bench.ids * words + (bench.ids * 7919) % words).cuda()
        self.seen = torch.zeros(LAYERS, bench.blocks, dtype=torch.int32, device="cuda")
        self.flat = [pool.view(torch.int32).view(-1) for pool in bench.pools]

    def __call__(self, gate: Callable[[int], Any] | None = None, written: Callable[[int], Any] | None = None) -> Any:
        x, new = self.x, self.new
        for layer, (qkv, o, up, down) in enumerate(self.weights):
            projected = F.rms_norm(x, (HIDDEN,)) @ qkv
            q = projected[:, : QUERY_HEADS * WIDTH].view(new, QUERY_HEADS, WIDTH).transpose(0, 1)[None]
            if gate is not None:
                gate(layer)
            torch.take(self.flat[layer], self.at, out=self.seen[layer])
            if written is not None:
                written(layer)
            mask = causal_lower_right(new, self.cached + new)
            a = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
            x = x + a[0].transpose(0, 1).reshape(new, QUERY_HEADS * WIDTH) @ o
            g = F.rms_norm(x, (HIDDEN,)) @ up
            x = x + (F.silu(g[:, :INNER]) * g[:, INNER:]) @ down
        return x

    def read_right(self, bench: Bench) -> bool:
        """Whether the forward read, in every layer, what the slots hold."""
        words = BLOCK_BYTES // 4
        rows, seen = np.arange(bench.blocks), self.seen.cpu().numpy()
        column = (bench.ids * 7919) % words
        return all(np.array_equal(bench.wanted(n, bench.slots)[rows, column], seen[n]) for n in range(LAYERS))


def ttft(bench: Bench, forward: Forward, mover: CudaMover, gate: CudaGate, *, save: str = "", blocks: int = 0) -> float:
    """ms from the order to load until the forward is done, planning included; its saves go on behind it."""
    progress = bench.progress
    progress.zero_()
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.cuda.stream(bench.compute):
        mark = mover.mark()
        lists = bench.lists(up=True)
        gate.arm(dict.fromkeys(range(LAYERS), 1))
        for layer, flight in enumerate(mover.submit_all(lists, after=[[mark]] * len(lists))):
            gate.open(layer, flight)
        written = None
        saves: list[Any] = []
        if save:
            out = bench.lists(up=False, blocks=blocks)
            if save == "step":
                at = [progress.data_ptr() + 4 * layer for layer in range(LAYERS)]
                saves = mover.submit_all(out, behind=at)
                stream = bench.compute.cuda_stream
                written = lambda layer: bench.driver.stream_writes_value(stream, at[layer], 1)  # noqa: E731
            else:
                written = lambda layer: saves.append(mover.submit(out[layer], after=[mover.mark()]))  # noqa: E731
        forward(lambda layer: gate.wait(layer, SOON_S), written)
    bench.compute.synchronize()
    took = (time.perf_counter() - began) * 1e3
    for flight in saves:
        flight.wait(SOON_S)
    return took


def trace(bench: Bench, forward: Forward, mover: CudaMover, gate: CudaGate) -> dict[str, float]:
    """Where one layerwise run's time goes on the model's thread, ms since its start."""
    torch.cuda.synchronize()
    stamps = {}
    began = time.perf_counter()

    def stamp(name: str) -> None:
        stamps[name] = (time.perf_counter() - began) * 1e3

    def wait(layer: int) -> None:
        if layer in (0, 1, 8, LAYERS - 1):
            stamp(f"at gate {layer}")
        gate.wait(layer, SOON_S)
        if layer in (0, 1, 8, LAYERS - 1):
            stamp(f"past gate {layer}")

    with torch.cuda.stream(bench.compute):
        mark = mover.mark()
        lists = bench.lists(up=True)
        stamp("planned")
        gate.arm(dict.fromkeys(range(LAYERS), 1))
        flights = mover.submit_all(lists, after=[[mark]] * len(lists))
        for layer, flight in enumerate(flights):
            gate.open(layer, flight)
        stamp("submitted")
        forward(wait)
    stamp("launched")
    flights[-1].wait(SOON_S)
    stamp("last copy landed")
    bench.compute.synchronize()
    stamp("done")
    return stamps


def alone(bench: Bench, forward: Forward) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.cuda.stream(bench.compute):
        forward()
    bench.compute.synchronize()
    return (time.perf_counter() - began) * 1e3


def bulk(bench: Bench, forward: Forward, mover: CudaMover) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    mover.submit_all(bench.lists(up=True))[-1].wait(SOON_S)
    with torch.cuda.stream(bench.compute):
        forward()
    bench.compute.synchronize()
    return (time.perf_counter() - began) * 1e3


def by_models_thread(bench: Bench, forward: Forward, plain: CudaMover) -> float:
    """The same batched copies, issued by the model's own thread before its first kernel."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    done = [torch.cuda.Event() for _ in range(LAYERS)]
    for layer, pieces in enumerate(bench.lists(up=True)):
        to, from_, nbytes = (np.ascontiguousarray(c) for c in (pieces.target, pieces.source, pieces.length))
        code = bench.driver.calls.copy_batch(
            *(c.ctypes.data for c in (to, from_, nbytes)),
            len(to),
            *bench.driver.batch_attributes,
            1,
            bench.copying.cuda_stream,
        )
        assert code == 0, code
        done[layer].record(bench.copying)
    with torch.cuda.stream(bench.compute):
        forward(lambda layer: bench.compute.wait_event(done[layer]))
    bench.compute.synchronize()
    return (time.perf_counter() - began) * 1e3


def contiguous_ms(bench: Bench, run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    bench.copying.synchronize()
    return (time.perf_counter() - began) * 1e3


def measured(ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for nth in range(repeats + 1):
        for name, run in ways.items():
            took = run()
            if nth:
                times[name].append(took)
    return {name: spread(values) for name, values in times.items()}


def case_overlap(bench: Bench, forward: Forward, shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """Time to first token of a prefill whose cached prefix comes from the slab."""
    return {f"{cached}+{new}": overlap_of(bench, forward, cached, new) for cached, new in shapes}


def overlap_of(bench: Bench, forward: Forward, cached: int, new: int) -> dict[str, Any]:
    bench.release()
    bench.reserve(cached)
    bench.progress = torch.zeros(LAYERS, dtype=torch.int32, device="cuda")
    forward.prepare(bench, cached, new)
    fast, plain, staged = bench.mover(), bench.mover("plain"), bench.mover("compiled", "staged")
    gate, copies = CudaGate(bench.driver), bench.contiguous(up=True)
    blocks = max(1, new // BLOCK)
    ways: dict[str, Callable[[], float]] = {
        "compute alone": lambda: alone(bench, forward),
        "contiguous load alone": lambda copies=copies: contiguous_ms(bench, copies),
        "bulk": lambda fast=fast: bulk(bench, forward, fast),
        "layerwise": lambda fast=fast, gate=gate: ttft(bench, forward, fast, gate),
        "layerwise, plain loop": lambda plain=plain, gate=gate: ttft(bench, forward, plain, gate),
        "layerwise, staged": lambda m=staged, gate=gate: ttft(bench, forward, m, gate),
        "layerwise, issued by the model's thread": lambda: by_models_thread(bench, forward, plain),
        "layerwise, saving a step": lambda f=fast, g=gate, b=blocks: ttft(bench, forward, f, g, save="step", blocks=b),
        "layerwise, saving a layer": lambda f=fast, g=gate, b=blocks: ttft(
            bench, forward, f, g, save="layer", blocks=b
        ),
    }
    result = measured(ways, 3 if cached > 100_000 else bench.repeats)
    floor = max(result[name]["median"] for name in ("compute alone", "contiguous load alone"))
    for values in result.values():
        values["of_floor"] = values["median"] / floor
    for name in ("step", "layer"):
        values = result[f"layerwise, saving {'a ' + name}"]
        values["of_off"] = values["median"] / result["layerwise"]["median"]
    checks = {}
    for name, mover in {"layerwise": fast, "plain": plain, "staged": staged}.items():
        for pool in bench.pools:
            pool.zero_()
        ttft(bench, forward, mover, gate)
        checks[name] = forward.read_right(bench)
    traces = {
        name: trace(bench, forward, m, gate) for name, m in {"auto": fast, "staged": staged, "plain": plain}.items()
    }
    summary = {"ways": result, "every block read as saved": checks, "pinning": bench.pin_times, "traces": traces}
    for mover in (fast, plain, staged):
        mover.close(SOON_S)
    return summary


def case_busy(bench: Bench, forward: Forward) -> dict[str, Any]:
    """Beside a Python thread that never sleeps."""
    found: dict[str, Any] = {}
    cached, new = 8192, 2048
    bench.release()
    bench.reserve(cached)
    bench.progress = torch.zeros(LAYERS, dtype=torch.int32, device="cuda")
    forward.prepare(bench, cached, new)
    movers = {"compiled": bench.mover(), "plain": bench.mover("plain")}
    gate = CudaGate(bench.driver)
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            count += 1

    def issue_to_landed(mover: CudaMover) -> float:
        """ms from the mover's taking the step up to its last event, as the device sees it: no Python thread in it."""
        lists = bench.lists(up=True)
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(bench.copying)
        began = time.perf_counter()
        flight = mover.submit_all(lists)[-1]
        flight.sleep_until_recorded(SOON_S)
        bench.driver.calls.wait(bench.copying.cuda_stream, flight.event.handle, 0)
        last.record(bench.copying)
        flight.wait(SOON_S)
        del began
        return first.elapsed_time(last)

    for busy in (False, True):
        thread = threading.Thread(target=spin)
        if busy:
            thread.start()
        ways: dict[str, Callable[[], float]] = {"compute alone": lambda: alone(bench, forward)}
        for name, mover in movers.items():
            ways[f"layerwise, {name}"] = lambda m=mover: ttft(bench, forward, m, gate)
            ways[f"issue to landed, {name}"] = lambda m=mover: issue_to_landed(m)
        found["busy" if busy else "quiet"] = measured(ways, min(bench.repeats, 5) if busy else bench.repeats)
        stop.set()
        if busy:
            thread.join()
        stop.clear()
    quiet, loud = found["quiet"], found["busy"]
    found["summary"] = {
        name: {
            "layerwise of compute alone, both busy": loud[f"layerwise, {name}"]["median"]
            / loud["compute alone"]["median"],
            "issue to landed, busy of quiet": loud[f"issue to landed, {name}"]["median"]
            / quiet[f"issue to landed, {name}"]["median"],
        }
        for name in movers
    }
    for mover in movers.values():
        mover.close(SOON_S)
    return found


def case_graph(bench: Bench, forward: Forward) -> dict[str, Any]:
    """A captured forward that waits for its layers and lets its saves go, with no host code between layers."""
    return {f"{cached}+{new}": graph_of(bench, forward, cached, new) for cached, new in ((8192, 512), (8192, 2048))}


def graph_of(bench: Bench, forward: Forward, cached: int, new: int) -> dict[str, Any]:
    bench.release()
    bench.reserve(cached)
    forward.prepare(bench, cached, new)
    mover, gate = bench.mover(), FlagGate(bench.driver, LAYERS)
    progress = FlagGate(bench.driver, LAYERS)
    blocks = max(1, new // BLOCK)
    stream = bench.compute
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    bare, gated = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(bare, stream=stream):
        bare_out = forward()
    with torch.cuda.graph(gated, stream=stream):
        handle = torch.cuda.current_stream().cuda_stream
        gated_out = forward(
            lambda layer: gate.capture_wait(layer, handle),
            lambda layer: bench.driver.stream_writes_value(handle, progress.flag(layer), 1),
        )

    def run(graph: Any, load: bool = False, save: bool = False) -> float:
        torch.cuda.synchronize()
        saves: list[Any] = []
        began = time.perf_counter()
        if load:
            gate.arm(dict.fromkeys(range(LAYERS), 1))
        progress._flags[:] = 0
        with torch.cuda.stream(stream):
            graph.replay()
        if load:
            lists = bench.lists(up=True)
            for layer, flight in enumerate(mover.submit_all(lists, flags=list(map(gate.flag, range(LAYERS))))):
                gate.open(layer, flight)
        if save:
            out = bench.lists(up=False, blocks=blocks)
            saves = mover.submit_all(out, behind=list(map(progress.flag, range(LAYERS))))
        stream.synchronize()
        took = (time.perf_counter() - began) * 1e3
        for flight in saves:
            flight.wait(SOON_S)
        if load:
            for layer in range(LAYERS):
                gate.wait(layer, SOON_S)
        return took

    copies = bench.contiguous(up=True)
    ways = {
        "bare graph": lambda: run(bare),
        "gated graph, open": lambda: run(gated),
        "contiguous load alone": lambda copies=copies: contiguous_ms(bench, copies),
        "gated graph, load": lambda: run(gated, load=True),
        "gated graph, load and save": lambda: run(gated, load=True, save=True),
    }
    result = measured(ways, bench.repeats)
    open_ms = result["gated graph, open"]["median"]
    for values in result.values():
        values["of_open"] = values["median"] / open_ms
        values["of_floor"] = values["median"] / max(open_ms, result["contiguous load alone"]["median"])
    for pool in bench.pools:
        pool.zero_()
    run(gated, load=True, save=True)
    right = forward.read_right(bench)
    run(bare)
    summary = {
        "ways": result,
        "us a gate (wait and write)": (open_ms - result["bare graph"]["median"]) * 1e3 / LAYERS,
        "every block read as saved": right,
        "output equal to the bare graph's": bool(torch.equal(bare_out, gated_out)),
    }
    mover.close(SOON_S)
    gate.close()
    progress.close()
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", default="layers,beside,gate,overlap,busy,graph,long")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shapes", default="8192+2048,8192+512,32768+1024,2048+256", help="of overlap: cached+new")
    given = parser.parse_args()
    shapes = [tuple(map(int, shape.split("+"))) for shape in given.shapes.split(",")]
    bench = Bench(8192, given.repeats)
    version = ctypes.c_int()
    bench.driver._lib.cuDriverGetVersion(ctypes.byref(version))
    result: dict[str, Any] = {
        "command": f"python {' '.join(sys.argv)}",
        "card": torch.cuda.get_device_name(),
        "versions": {
            "layercast": layercast.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda driver": version.value,
        },
        "loop compiled in s": bench.compile_s,
        "pinning": bench.pin_times,
    }
    forward: list[Forward] = []

    def model() -> Forward:
        if not forward:
            forward.append(Forward())
        return forward[0]

    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "layers": lambda: case_layers(bench),
        "beside": lambda: case_beside(bench),
        "gate": lambda: case_gate(bench),
        "overlap": lambda: case_overlap(bench, model(), shapes),
        "busy": lambda: case_busy(bench, model()),
        "graph": lambda: case_graph(bench, model()),
        "long": lambda: case_overlap(bench, model(), [(131072, 1024)]),
    }
    for name in given.only.split(","):
        began = time.perf_counter()
        result[name] = cases[name]()
        result[name]["took_s"] = time.perf_counter() - began
        given.json.write_text(json.dumps(result, indent=1))
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    bench.release()


if __name__ == "__main__":
    main()
