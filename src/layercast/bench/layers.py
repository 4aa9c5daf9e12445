"""`layercast bench layers`: blocks between scattered places, on a quiet device and beside matrix products."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from layercast.bench.ground import Device, Ground, Shape, ground
from layercast.bench.results import SOON_S, Start, Table, in_turn, median, rates, timed_in_turn
from layercast.bench.rivals import Rival, rivals
from layercast.move.costs import Way
from layercast.move.cuda import CudaMover
from layercast.plan.pieces import Pieces, Series

PRODUCTS = 300
"""Matrix products in a row: 105 ms of an H100."""
TIMES = 3
"""Times that all blocks move beside them."""
DIRECTIONS = {"host to device": True, "device to host": False}


def layers(device: Device, shape: Shape, tokens: int, repeats: int, *, brief: bool = False) -> Iterator[Table]:
    """A table a direction on a quiet device, then one a direction beside products. brief: the limit and one mover.

    To the device a layer is a part, from it a few layers are, as an engine has them moved.
    """
    with ground(device, shape, tokens) as here, ExitStack() as stack:

        def mover(way: Way | None = None, *, plain: bool = False) -> CudaMover:
            made = here.mover(way, plain=plain)
            stack.callback(made.close, SOON_S)
            return made

        movers = {"layercast": mover()}
        if not brief:
            movers |= {f"layercast, {way} alone": mover(way) for way in device.ways if way is not Way.ENGINE}
        others, absent = ({}, {}) if brief else rivals(here)
        checks = {name: bit_equal(here, each) for name, each in movers.items()}
        about = f"{tokens} tokens in blocks of {shape.block}"
        for name, up in DIRECTIONS.items():
            ways = _ways(here, movers, others, up=up)
            if not brief:
                halves = here.step(up=up, halves=True)
                ways["layercast, Python loop"] = whole(mover(plain=True), [here.step(up=up)])
                ways |= {f"{each}, K and V apart": whole(way, [halves]) for each, way in movers.items()}
            yield quiet(here, f"{name}, {about}", ways, repeats, checks, absent)
        for name, up in DIRECTIONS.items():
            ways = _ways(here, movers, others, up=up)
            ways.pop("one copy a block", None)
            if not brief:
                ways["layercast, K and V apart"] = whole(movers["layercast"], [here.step(up=up, halves=True)])
            yield beside(here, f"{name} beside matrix products, {about}", ways, repeats, absent)


def _ways(here: Ground, movers: dict[str, CudaMover], others: dict[str, Rival], *, up: bool) -> dict[str, Start]:
    """The limit, what movers do, and what rivals do."""
    batches = [here.step(up=True)] if up else here.save()
    ways = {name: whole(mover, batches) for name, mover in movers.items()}
    return {
        "contiguous": here.contiguous(up=up),
        **ways,
        **{name: rival.start(up=up) for name, rival in others.items()},
    }


def whole(mover: CudaMover, batches: Sequence[Pieces | Series]) -> Start:
    """All layers in one order."""

    def start() -> Callable[[], None]:
        flight = mover.submit_all(batches)[-1]
        return lambda: flight.wait(SOON_S)

    return start


def bit_equal(here: Ground, mover: CudaMover) -> bool:
    """Whether a load and a save bring every bit."""
    here.blank()
    mover.submit_all([here.step(up=True)])[0].wait(SOON_S)
    if not here.arrived():
        return False
    kept = here.host.copy()
    here.host[:] = 0
    mover.submit_all(here.save())[-1].wait(SOON_S)
    same = bool(np.array_equal(kept, here.host))
    here.host[:] = kept
    return same


def quiet(
    here: Ground,
    title: str,
    ways: dict[str, Start],
    repeats: int,
    checks: dict[str, bool],
    absent: dict[str, str],
) -> Table:
    """How fast each way is with the device to itself, and what it costs the thread that calls."""
    took = timed_in_turn(ways, repeats, torch.cuda.synchronize)
    rows = {name: rates(runs, here.nbytes, here.shape.layers) for name, runs in took.items()}
    for row in rows.values():
        row["of contiguous"] = row["GB/s"] / rows["contiguous"]["GB/s"]
    return Table(title=title, rows=rows, bar="GB/s", best="contiguous", checks=checks, absent=absent, note=here.about)


def beside(here: Ground, title: str, ways: dict[str, Start], repeats: int, absent: dict[str, str]) -> Table:
    """How fast each way is beside matrix products that fill the device, and by how much it slows those down."""
    a = torch.randn(2048, here.shape.hidden, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(here.shape.hidden, here.shape.inner, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(2048, here.shape.inner, device="cuda", dtype=torch.bfloat16)

    def round_of(start: Start | None) -> tuple[float, float]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(here.device.compute):
            for _ in range(5):
                torch.mm(a, w, out=out)
            first.record()
        with ThreadPoolExecutor(1) as side:
            copies = side.submit(_copied_ms, start, here.device.number)
            with torch.cuda.stream(here.device.compute):
                for _ in range(PRODUCTS):
                    torch.mm(a, w, out=out)
                last.record()
            copied_ms = copies.result()
        torch.cuda.synchronize()
        return first.elapsed_time(last), copied_ms

    starts: dict[str, Start | None] = {"products alone": None, **ways}
    took = in_turn({name: partial(round_of, start) for name, start in starts.items()}, repeats)
    alone = median([ms for ms, _ in took["products alone"]])
    limit = median([copied for _, copied in took["contiguous"]])
    rows = {}
    for name, runs in took.items():
        ms, copied = median([ms for ms, _ in runs]), median([copied for _, copied in runs])
        rows[name] = {"products ms": ms}
        if copied:
            rows[name] = {
                "GB/s": TIMES * here.nbytes / copied / 1e6,
                "of contiguous": limit / copied,
                # Of the time that they shared: copies may end before the products do, or after.
                "products slower %": (ms - alone) / min(copied, ms) * 100,
                "copies ms": copied,
                **rows[name],
            }
    note = "Copies ran a few times in a row; the slow-down is that of the time in which both ran."
    return Table(title=title, rows=rows, bar="GB/s", best="contiguous", absent=absent, note=note)


def _copied_ms(start: Start | None, device: int) -> float:
    """ms that copies took, on a thread of their own so that they do not hold up who launches products; 0: no copies."""
    if start is None:
        return 0.0
    torch.cuda.set_device(device)
    began = time.perf_counter()
    for finish in [start() for _ in range(TIMES)]:
        finish()
    return (time.perf_counter() - began) * 1e3
