"""`layercast bench peer`: blocks from one GPU's memory into another's, and all GPUs loading at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from layercast.bench.ground import Device, Ints, Shape, engine_layout, ground, layer_by_layer
from layercast.bench.layers import whole
from layercast.bench.results import SOON_S, Start, Table, in_turn, median, rates, spread, timed_in_turn
from layercast.move.costs import Way
from layercast.move.cuda import CudaMover
from layercast.move.flights import HostFlight, delayed
from layercast.move.kernels.pieces import WARPS
from layercast.move.kernels.pieces_host import BLOCK, MULTIPLES, best_scribe, even
from layercast.plan.pieces import Series, route_between

PROGRAMS = (16, 32, 64, 96, 132)
"""Numbers of the kernel's programs to compare with the number that the mover takes."""
STAGGERS_US = (0, 100, 1000)


def peer(devices: Sequence[Device], shape: Shape, tokens: int, repeats: int) -> Iterator[Table]:
    """A table of all devices loading from the host at once, then one for each device that the first one writes.

    Raises Refused where a device does not reach the other.
    """
    yield at_once(devices, shape, tokens, repeats)
    for other in devices[1:]:
        yield pushed(devices[0], other, shape, tokens, repeats)


def pushed(device: Device, other: Device, shape: Shape, tokens: int, repeats: int) -> Table:
    """Scattered blocks of one device into scattered blocks of the other."""
    blocks, choose = tokens // shape.block, np.random.default_rng(0)
    size = (blocks + blocks // 4, shape.block_bytes // 2)
    sources = [
        torch.randint(0, 100, size, device=f"cuda:{device.number}").to(torch.bfloat16) for _ in range(shape.layers)
    ]
    targets = [torch.zeros(size, dtype=torch.bfloat16, device=f"cuda:{other.number}") for _ in range(shape.layers)]
    from_, to = choose.permutation(size[0])[:blocks], choose.permutation(size[0])[:blocks]
    groups = [engine_layout(shape, pools).groups[0] for pools in (sources, targets)]
    plan = route_between(groups[0], groups[1]).plan(from_.tolist(), to.tolist())
    step = layer_by_layer(plan)
    movers = {"layercast": device.mover(peers=[other]), "copy engine, a batch a layer": device.mover(Way.ENGINE)}
    torch.cuda.set_device(device.number)
    ways: dict[str, Start] = {"copy engine, contiguous": _contiguous(device, sources, targets, blocks)}
    ways |= {name: whole(mover, [step]) for name, mover in movers.items()}
    if device.kernel is not None:
        ways |= {f"kernel, {programs} programs": _kernel(device, step, programs) for programs in PROGRAMS}
    took = timed_in_turn(ways, repeats, torch.cuda.synchronize)
    nbytes = shape.layers * blocks * shape.block_bytes
    rows = {name: rates(runs, nbytes, shape.layers) for name, runs in took.items()}
    best = max((name for name in rows if name.startswith("kernel")), key=lambda n: rows[n]["GB/s"], default="layercast")
    for row in rows.values():
        row["of best kernel"] = row["GB/s"] / rows[best]["GB/s"]
    checks = {
        f"{name}: bit equal": _bit_equal(mover, step, (sources, from_), (targets, to)) for name, mover in movers.items()
    }
    for mover in movers.values():
        mover.close(SOON_S)
    title = f"device {device.number} to device {other.number}, {tokens} tokens in blocks of {shape.block}"
    return Table(title=title, rows=rows, bar="GB/s", best=best, checks=checks)


def at_once(devices: Sequence[Device], shape: Shape, tokens: int, repeats: int) -> Table:
    """Every device loads its blocks from its own slab: one alone, then all, each so much later than the one before."""
    with ExitStack() as stack:
        grounds = [stack.enter_context(ground(device, shape, tokens)) for device in devices]
        movers = [here.mover() for here in grounds]
        steps = [here.step(up=True) for here in grounds]

        def load(count: int, stagger_us: float) -> list[float]:
            """ms from its start to the landing, for each of the first devices; then from the first's to the last's."""
            for device in devices:
                torch.cuda.synchronize(device.number)
            ends, landed = [HostFlight() for _ in range(count)], [0.0] * count

            def end(rank: int) -> None:
                landed[rank] = time.perf_counter()
                ends[rank].land()

            def start(rank: int) -> None:
                movers[rank].submit_all([steps[rank]])[0].then(lambda _: end(rank))

            began = time.perf_counter()
            for rank in range(count):
                if rank and stagger_us:
                    delayed(rank * stagger_us / 1e6).then(lambda _, rank=rank: start(rank))  # type: ignore[misc]
                else:
                    start(rank)
            for flight in ends:
                flight.wait(SOON_S)
            each = [(at - began) * 1e3 - rank * stagger_us / 1e3 for rank, at in enumerate(landed)]
            return [*each, (max(landed) - began) * 1e3]

        ways: dict[str, Callable[[], list[float]]] = {"one alone": partial(load, 1, 0)}
        for stagger_us in STAGGERS_US:
            name = f"all {len(devices)}" + (f", each {stagger_us} us later" if stagger_us else "")
            ways[name] = partial(load, len(devices), stagger_us)
        took = in_turn(ways, repeats)
        for device in devices:
            torch.cuda.synchronize(device.number)
        checks = {f"device {here.device.number}: every block as saved": here.arrived() for here in grounds}
        for mover in movers:
            mover.close(SOON_S)
        rows = {
            name: {
                "GB/s a device": grounds[0].nbytes / median([max(run[:-1]) for run in runs]) / 1e6,
                "GB/s in all": (len(runs[0]) - 1) * grounds[0].nbytes / median([run[-1] for run in runs]) / 1e6,
                **spread("ms until all landed", [run[-1] for run in runs]),
            }
            for name, runs in took.items()
        }
    title = f"{len(devices)} devices load {tokens} tokens each (h2d_stagger_us)"
    return Table(title=title, rows=rows, bar="GB/s in all", checks=checks, note="GB/s a device: of the slowest.")


def _contiguous(device: Device, sources: list[torch.Tensor], targets: list[torch.Tensor], blocks: int) -> Start:
    def start() -> Callable[[], None]:
        with torch.cuda.stream(device.copying):
            for source, target in zip(sources, targets, strict=True):
                target[:blocks].copy_(source[:blocks], non_blocking=True)
        return device.copying.synchronize  # type: ignore[no-any-return]

    return start


def _kernel(device: Device, step: Series, programs: int) -> Start:
    """The kernel itself, with tables that are on the device already, launched by torch's thread."""
    from layercast.move.kernels.pieces_triton import copy_pieces

    scribe, counts, tables, longest = best_scribe(), [], [], 0
    for pieces in step:
        written = np.empty(3 * even(pieces.size[1]), np.int64)
        count, chunks = scribe.spread(pieces.placed, written, 0)
        assert count >= 0, MULTIPLES
        longest = max(longest, chunks)
        counts.append(count)
        tables.append(torch.from_numpy(written[: 3 * even(count)].reshape(3, -1)).to(device.copying.device))

    def start() -> Callable[[], None]:
        with torch.cuda.stream(device.copying):
            for table, count in zip(tables, counts, strict=True):
                copy_pieces[(programs,)](*table, count, longest, 0, 0, BLOCK=BLOCK, num_warps=WARPS)
        return device.copying.synchronize  # type: ignore[no-any-return]

    return start


def _bit_equal(
    mover: CudaMover,
    step: Series,
    source: tuple[list[torch.Tensor], Ints],
    target: tuple[list[torch.Tensor], Ints],
) -> bool:
    """Whether torch, gathering on each side by itself, finds the same in both."""
    for pool in target[0]:
        pool.zero_()
        torch.cuda.synchronize(pool.device)
    mover.submit_all([step])[0].wait(SOON_S)
    (sources, from_), (targets, to) = source, target
    return all(
        torch.equal(
            theirs.view(torch.int16)[torch.from_numpy(to).to(theirs.device)].cpu(),
            ours.view(torch.int16)[torch.from_numpy(from_).to(ours.device)].cpu(),
        )
        for ours, theirs in zip(sources, targets, strict=True)
    )
