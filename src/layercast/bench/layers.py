"""`layercast bench layers`: blocks between scattered places, on a quiet device and beside matrix products."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from layercast.bench.ground import Device, Ground, Shape, ground
from layercast.bench.results import SOON_S, Start, Table, in_turn, median, rates, timed_in_turn
from layercast.bench.rivals import rivals
from layercast.move.costs import Way
from layercast.move.cuda import CudaMover
from layercast.plan.pieces import Pieces

PRODUCTS = 300
"""Matrix products in a row: 105 ms of an H100."""
TIMES = 3
"""Times that all blocks move beside them."""
DIRECTIONS = {"host to device": True, "device to host": False}


def layers(device: Device, shape: Shape, tokens: int, repeats: int, *, brief: bool = False) -> Iterator[Table]:
    """A table a direction on a quiet device, then one a direction beside products. brief: the limit and one mover."""
    with ground(device, shape, tokens) as here:
        movers: dict[str, CudaMover] = {"layercast": device.mover()}
        if brief:
            yield from _brief(here, movers["layercast"], repeats)
            movers["layercast"].close(SOON_S)
            return
        movers |= {f"layercast, {way} alone": device.mover(way) for way in device.ways if way is not Way.ENGINE}
        loop = device.mover(plain=True)
        others, absent = rivals(here)
        checks = {name: bit_equal(here, mover) for name, mover in movers.items()}
        for name, up in DIRECTIONS.items():
            ways = {"contiguous": here.contiguous(up=up)}
            lists, halves = here.lists(up=up), here.lists(up=up, halves=True)
            ways |= {name: whole(mover, lists) for name, mover in movers.items()}
            ways["layercast, Python loop"] = whole(loop, lists)
            ways["layercast, a submit a layer"] = one_by_one(movers["layercast"], lists)
            ways |= {f"{name}, K and V apart": whole(mover, halves) for name, mover in movers.items()}
            ways |= {rival: start.start(up=up) for rival, start in others.items()}
            title = f"{name}, {tokens} tokens in blocks of {shape.block}"
            yield quiet(here, title, ways, repeats, checks, absent)
        for name, up in DIRECTIONS.items():
            lists, halves = here.lists(up=up), here.lists(up=up, halves=True)
            ways = {"contiguous": here.contiguous(up=up)}
            ways |= {name: whole(mover, lists) for name, mover in movers.items()}
            ways["layercast, K and V apart"] = whole(movers["layercast"], halves)
            ways |= {rival: start.start(up=up) for rival, start in others.items() if rival != "one copy a block"}
            title = f"{name} beside matrix products, {tokens} tokens in blocks of {shape.block}"
            yield beside(here, title, ways, repeats, absent)
        for mover in (*movers.values(), loop):
            mover.close(SOON_S)


def _brief(here: Ground, mover: CudaMover, repeats: int) -> Iterator[Table]:
    checks, about = {"layercast": bit_equal(here, mover)}, f"{here.blocks} blocks of {here.shape.block} tokens"
    for name, up in DIRECTIONS.items():
        ways = {"contiguous": here.contiguous(up=up), "layercast": whole(mover, here.lists(up=up))}
        yield quiet(here, f"{name}, {about}", ways, repeats, checks, {})
        yield beside(here, f"{name} beside matrix products, {about}", ways, repeats, {})


def whole(mover: CudaMover, lists: list[Pieces]) -> Start:
    """All layers in one order."""

    def start() -> Callable[[], None]:
        flight = mover.submit_all(lists)[-1]
        return lambda: flight.wait(SOON_S)

    return start


def one_by_one(mover: CudaMover, lists: list[Pieces]) -> Start:
    """An order a layer."""

    def start() -> Callable[[], None]:
        flight = [mover.submit(pieces) for pieces in lists][-1]
        return lambda: flight.wait(SOON_S)

    return start


def bit_equal(here: Ground, mover: CudaMover) -> bool:
    """Whether a load and a save bring every bit."""
    for pool in here.pools:
        pool.zero_()
    torch.cuda.synchronize()
    mover.submit_all(here.lists(up=True))[-1].wait(SOON_S)
    if not here.arrived():
        return False
    kept = here.host.copy()
    here.host[:] = 0
    mover.submit_all(here.lists(up=False))[-1].wait(SOON_S)
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
