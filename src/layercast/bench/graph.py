"""`layercast bench graph`: what a gate costs, and a captured forward that loads and saves with no host code between."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch

from layercast.bench.ground import Device, Ground, Shape, ground
from layercast.bench.model import Forward, Weights
from layercast.bench.results import SOON_S, Table, in_turn, median, spread, timed
from layercast.move.cuda_gates import FlagGate

OPENINGS, WARM = 200, 20


def graph(device: Device, shape: Shape, lengths: Sequence[tuple[int, int]], repeats: int) -> Iterator[Table]:
    """One table of a single gate, then one for each (cached, new) tokens."""
    yield one_gate(device)
    weights = Weights(shape)
    for cached, new in lengths:
        with ground(device, shape, cached) as here:
            yield captured(here, Forward(weights, here, new), repeats)


def one_gate(device: Device) -> Table:
    """From the end of a copy to the start of what waits for it, by an event and by a flag."""
    host = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    pool = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    gate = FlagGate(device.driver, 1)
    rows = {}
    for by in ("event", "flag"):
        times, calls = [], []
        for _ in range(OPENINGS):
            torch.cuda.synchronize()
            copied, started = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            done = torch.cuda.Event()
            gate.arm({0: 1})
            with torch.cuda.stream(device.copying):
                torch.cuda._sleep(100_000)
                pool.copy_(host, non_blocking=True)
                copied.record()
                if by == "event":
                    done.record()
                else:
                    device.driver.stream_writes_value(device.copying.cuda_stream, gate.flag(0), 1)
            began = time.perf_counter()
            with torch.cuda.stream(device.compute):
                if by == "event":
                    device.compute.wait_event(done)
                else:
                    gate.capture_wait(0, device.compute.cuda_stream)
                calls.append((time.perf_counter() - began) * 1e6)
                started.record()
            torch.cuda.synchronize()
            gate.reset()
            times.append(copied.elapsed_time(started) * 1e3)
        rows[by] = {**spread("us from open to start", times[WARM:]), "host us": median(calls[WARM:])}
    gate.close()
    return Table(title="One gate", rows=rows, bar="us from open to start")


def captured(here: Ground, forward: Forward, repeats: int) -> Table:
    """A bare graph beside one with a wait and a write a layer: open, loading, loading and saving."""
    with closing(_Captured(here, forward)) as run:
        limit = here.contiguous(up=True)
        ways: dict[str, Callable[[], float]] = {
            "bare graph": lambda: run.ms(run.bare),
            "gated graph, all open": lambda: run.ms(run.gated),
            "contiguous load alone": lambda: timed(limit, torch.cuda.synchronize)[1],
            "gated graph, loading": lambda: run.ms(run.gated, load=True),
            "gated graph, loading and saving": lambda: run.ms(run.gated, load=True, save=True),
        }
        rows = {name: spread("ms", took) for name, took in in_turn(ways, repeats).items()}
        for row in rows.values():
            row["of open"] = row["ms"] / rows["gated graph, all open"]["ms"]
        cost = (rows["gated graph, all open"]["ms"] - rows["bare graph"]["ms"]) * 1e3 / here.shape.layers
        rows["gated graph, all open"]["us a gate"] = cost
        checks = run.checks()
    tokens = here.blocks * here.shape.block
    best = max(("gated graph, all open", "contiguous load alone"), key=lambda name: rows[name]["ms"])
    return Table(
        title=f"A captured forward, {tokens}+{forward.new} tokens",
        rows=rows,
        bar="ms",
        best=best,
        checks=checks,
        note="A gate: one wait before a layer reads its blocks and one write once its own KV is in place.",
    )


class _Captured:
    """The same forward captured twice, bare and gated, with flags that let it go on and flags that let saves go."""

    def __init__(self, here: Ground, forward: Forward) -> None:
        driver, layers = here.device.driver, here.shape.layers
        self.here, self.forward, self.stream = here, forward, here.device.compute
        self.mover = here.mover()
        self.gate, self.progress = FlagGate(driver, layers), FlagGate(driver, layers)
        with torch.cuda.stream(self.stream):
            forward()
        torch.cuda.synchronize()
        self.bare, self.gated = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.bare, stream=self.stream):
            self.bare_out = forward()
        with torch.cuda.graph(self.gated, stream=self.stream):
            handle = torch.cuda.current_stream().cuda_stream
            self.gated_out = forward(
                lambda layer: self.gate.capture_wait(layer, handle),
                lambda layer: driver.stream_writes_value(handle, self.progress.flag(layer), 1),
            )

    def close(self) -> None:
        """Give mover and flags back."""
        torch.cuda.synchronize()
        self.mover.close(SOON_S)
        self.gate.close()
        self.progress.close()

    def ms(self, graph: Any, *, load: bool = False, save: bool = False) -> float:  # noqa: ANN401
        """ms of a replay, until the forward is done."""
        layers = range(self.here.shape.layers)
        torch.cuda.synchronize()
        self.progress.reset()
        began, saves = time.perf_counter(), []
        if load:
            self.gate.arm(dict.fromkeys(layers, 1))
        if save:
            self.progress.arm(dict.fromkeys(layers, 1))
        with torch.cuda.stream(self.stream):
            graph.replay()
        if load:
            flags = [self.gate.flag(layer) for layer in layers]
            for layer, flight in enumerate(self.mover.submit_all([*self.here.step(up=True)], flags=flags)):
                self.gate.open(layer, flight)
        if save:
            out = [*self.here.step(up=False, tokens=self.forward.new)]
            saves = self.mover.submit_all(out, behind=[self.progress.flag(layer) for layer in layers])
        self.stream.synchronize()
        took = (time.perf_counter() - began) * 1e3
        for flight in saves:
            flight.wait(SOON_S)
        for layer in layers if load else ():
            self.gate.wait(layer, SOON_S)
        return took

    def checks(self) -> dict[str, bool]:
        """Over zeroed blocks: what the gated graph read, and whether its output is the bare one's."""
        self.here.blank()
        self.ms(self.gated, load=True, save=True)
        right = self.forward.read_right()
        self.ms(self.bare)
        same = bool(torch.equal(self.bare_out, self.gated_out))
        return {"every block read as saved": right, "output equal to the bare graph's": same}
