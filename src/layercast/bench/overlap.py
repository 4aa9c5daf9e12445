"""`layercast bench overlap`: time to the first token of a prefill whose cached prefix comes from pinned memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import torch

from layercast.bench.ground import Device, Ground, Shape, ground
from layercast.bench.model import Forward, Hook, Weights
from layercast.bench.results import SOON_S, Table, Timeline, in_turn, ratio, spread, timed
from layercast.move.base import Flight
from layercast.move.costs import Way
from layercast.move.cuda import CudaMover
from layercast.move.cuda_flights import CudaFlight
from layercast.move.cuda_gates import CudaGate
from layercast.move.flights import HostFlight
from layercast.plan.pieces import Series

LONG = 100_000
"""Cached tokens from which a round takes seconds, so that few must do."""
FEW = 3
SHORT, TIMES = 4096, 3
"""Cached tokens up to which launches take most of a forward, so that its times scatter: so many times the rounds."""
TRACED = 5
"""Runs of which the middle one's timeline is told."""
ALONE, LOAD, LIMIT = "compute alone", "contiguous load alone", "contiguous copy a layer"
SAVING = "layerwise, saving too"


def overlap(
    device: Device, shape: Shape, lengths: Sequence[tuple[int, int]], repeats: int, *, brief: bool = False
) -> Iterator[Table]:
    """A table for each (cached, new) tokens. brief: without other ways to issue and to move."""
    weights = Weights(shape)
    for cached, new in lengths:
        with ground(device, shape, cached) as here, closing(Run(here, Forward(weights, here, new))) as run:
            rounds = FEW if cached > LONG else TIMES * repeats if cached < SHORT else repeats
            yield first_tokens(run, rounds, brief=brief)


class Run:
    """What one length is measured with: movers, the gate of a forward with hooks, and the forward."""

    def __init__(self, here: Ground, forward: Forward) -> None:
        device = here.device
        self.here, self.forward = here, forward
        self.auto, self.plain = here.mover(), here.mover(plain=True)
        self.staged = here.mover(Way.STAGED) if device.kernel else None
        self.whole = here.whole_mover()
        self.in_order = here.in_order()
        self.gate = CudaGate(device.driver)
        self.contiguous = here.contiguous(up=True)
        self.ordered: list[CudaFlight] = []
        """Loads of the body that is being timed."""

    def close(self) -> None:
        """Give the movers back."""
        for mover in filter(None, (self.auto, self.plain, self.staged, self.whole)):
            mover.close(SOON_S)

    def ms(self, body: Callable[[], object]) -> float:
        """ms of the body on a quiet device, until the computing stream has done what it queued.

        Raises what a load of it was refused with: a forward passes its gates then, and would look fast.
        """
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.cuda.stream(self.here.device.compute):
            body()
        self.here.device.compute.synchronize()
        took = (time.perf_counter() - began) * 1e3
        ordered, self.ordered = self.ordered, []
        for flight in ordered:
            flight.wait(SOON_S)
        return took

    def contiguous_ms(self) -> float:
        """The load alone, at the link's limit."""
        return timed(self.contiguous, torch.cuda.synchronize)[1]

    def bulk(self) -> None:
        """All layers first, then the forward."""
        self.auto.submit_all([self.here.step(up=True)])[0].wait(SOON_S)
        self.forward()

    def layerwise(self, mover: CudaMover, written: Hook | None = None) -> None:
        """Plan, order all layers, and go: each layer waits for its own."""
        self.order(mover, self.here.step(up=True))
        self.forward(self.passed, written)

    def order(self, mover: CudaMover, step: Series) -> CudaFlight:
        """Order the loads of all layers behind the stream's work, each with its gate."""
        mark = mover.mark()
        (flight,) = mover.submit_all([step], after=[[mark]])
        self.gate.arm_behind({}, [({layer: layer for layer in range(len(step))}, flight)])
        self.ordered.append(flight)
        return flight

    def passed(self, layer: int) -> None:
        """The hook before a layer reads its blocks."""
        self.gate.wait(layer, SOON_S)

    def limit(self, mover: CudaMover) -> None:
        """What layerwise loads could reach: one long copy a layer, planned beforehand."""
        self.order(mover, self.in_order)
        self.forward(self.passed)

    def timeline(self, mover: CudaMover, step: Callable[[], Series]) -> Timeline:
        """When what happened in the middle one of a few layerwise runs."""
        return sorted((self._traced(mover, step) for _ in range(TRACED)), key=lambda line: line.done)[TRACED // 2]

    def _traced(self, mover: CudaMover, step: Callable[[], Series]) -> Timeline:
        """Planning counts. A stream that waits for each layer in turn tells when it had landed."""
        layers, device = range(self.here.shape.layers), self.here.device
        start, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        landed, reached, began = ([torch.cuda.Event(enable_timing=True) for _ in layers] for _ in range(3))
        ordered = 0.0

        def gate(layer: int) -> None:
            reached[layer].record()
            self.passed(layer)
            began[layer].record()

        def body() -> None:
            nonlocal ordered
            since = time.perf_counter()
            start.record()
            flight = self.order(mover, step())
            ordered = (time.perf_counter() - since) * 1e3
            clock = device.copying.cuda_stream
            for layer, event in enumerate(landed):
                part = flight.part(layer)
                device.driver.stream_waits_for_value(clock, part.wave.tally.address, part.number)
                event.record(device.copying)
            self.forward(gate)
            done.record()

        self.ms(body)
        torch.cuda.synchronize()
        columns = [tuple(round(start.elapsed_time(at), 3) for at in events) for events in (landed, reached, began)]
        return Timeline(
            ordered=round(ordered, 3),
            landed=columns[0],
            reached=columns[1],
            began=columns[2],
            done=round(start.elapsed_time(done), 3),
        )

    def saving(self) -> float:
        """Layerwise, and what is new is saved as a worker has it saved; ms until the forward is done."""
        here, new, mover = self.here, self.forward.new, self.auto
        last, marks, saves = {part[-1] for part in here.parts(new)}, list[Flight](), list[CudaFlight]()
        handed = HostFlight()

        def written(layer: int) -> None:
            if layer in last:
                marks.append(mover.mark())

        def hand_over() -> None:
            saves.extend(mover.submit_all(here.save(new), after=[[mark] for mark in marks]))

        def body() -> None:
            self.layerwise(mover, written)
            mover.aside(hand_over, lambda error: handed.land() if error is None else handed.fail(error))

        took = self.ms(body)
        handed.wait(SOON_S)
        for flight in saves:
            flight.wait(SOON_S)
        return took

    def reads_right(self, mover: CudaMover) -> bool:
        """Whether a layerwise forward over zeroed blocks reads what the slots hold."""
        self.here.blank()
        self.ms(lambda: self.layerwise(mover))
        return self.forward.read_right()


def first_tokens(run: Run, repeats: int, *, brief: bool = False) -> Table:
    """Compute and load alone, bulk, layerwise in several ways, with saves and without."""
    others = {} if brief else {"layerwise, Python loop": run.plain}
    if run.staged is not None and not brief:
        others["layerwise, staged alone"] = run.staged
    movers = {"layerwise": run.auto, **others}
    checks = {f"{name}: every block read as saved": run.reads_right(mover) for name, mover in movers.items()}
    timelines = dict[str, Timeline]()
    if not brief:
        timelines["layerwise"] = run.timeline(run.auto, lambda: run.here.step(up=True))
    if (whole := run.whole) is not None:
        if not brief:
            timelines[LIMIT] = run.timeline(whole, lambda: run.in_order)
        run.ms(lambda: run.limit(whole))
        checks[f"{LIMIT}: every byte as saved"] = run.here.arrived_in_order()
    took = in_turn(_ways(run, others), repeats)
    rows = {name: spread("ms", runs) for name, runs in took.items()}
    best = max((ALONE, LOAD), key=lambda name: rows[name]["ms"])
    for name, runs in took.items():
        rows[name] |= ratio("of floor", runs, took[best])
        if LIMIT in took:
            rows[name] |= ratio("of contiguous a layer", runs, took[LIMIT])
    rows[SAVING] |= ratio("of the same without saving", took[SAVING], took["layerwise"])
    here = run.here
    return Table(
        title=f"Time to the first token, {here.blocks * here.shape.block}+{run.forward.new} tokens",
        rows=rows,
        bar="ms",
        best=best,
        checks=checks,
        timelines=timelines,
        note="Floor: the longer of compute alone and a contiguous load alone. Planning is counted. Ratios: the medians "
        "of those of each round, with their 95 % intervals.",
    )


def _ways(run: Run, others: dict[str, CudaMover]) -> dict[str, Callable[[], float]]:
    """What runs in each round; what is compared most stands side by side."""
    ways: dict[str, Callable[[], float]] = {LOAD: run.contiguous_ms, ALONE: lambda: run.ms(run.forward)}
    if (whole := run.whole) is not None:
        ways[LIMIT] = lambda: run.ms(lambda: run.limit(whole))
    ways["layerwise"] = lambda: run.ms(lambda: run.layerwise(run.auto))
    ways[SAVING] = run.saving
    ways |= {name: lambda m=mover: run.ms(lambda: run.layerwise(m)) for name, mover in others.items()}  # type: ignore[misc]
    ways["bulk"] = lambda: run.ms(run.bulk)
    return ways
