"""What copies cost on this machine: measured once a device and link, in under two seconds, and kept in a file.

The file names the device, the driver and this package; where one of them has changed, or the file is damaged, all is
measured again. Does not know how a way is chosen, nor what will be copied.
"""

import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from layercast import __version__
from layercast.config import cache_folder
from layercast.errors import LayercastError
from layercast.move.base import Flight
from layercast.move.costs import DEFAULT_COSTS, CostFile, Costs, Direction, Way, only
from layercast.move.cuda_driver import Driver
from layercast.move.cuda_ways import Ints
from layercast.plan.pieces import Pieces

_log = logging.getLogger("layercast")
LONG, SHORT, MIDDLE = 64 << 20, 4 << 10, 16 << 10
"""Bytes of the long copy; of pieces so short that their number is all that counts; of those a kernel copies."""
COUNT, BATCHES = 512, 8
"""Pieces in a batch, batches in the shorter of two orders that are compared; the longer is about a step of a model."""
ROUNDS = 7
SOON_S = 10.0
PRODUCT, PRODUCTS = 4096, 1000
"""Rows of the square matrices that a kernel's copies are measured beside, and how many products: 0.2 s of an H100."""

Beside = Callable[[int], AbstractContextManager[None]]
"""beside(device): something that keeps the device's cores busy inside the block."""


class Measurable(Protocol):
    """A mover whose ways can be chosen from outside."""

    @property
    def driver(self) -> Driver:
        """The device it works on."""
        ...

    def prefer(self, costs: dict[Direction, Costs]) -> None:
        """Choose ways by these costs from now on."""
        ...

    def submit_all(self, batches: Sequence[Pieces]) -> Sequence[Flight]:
        """Copy, batch by batch; returns at once."""
        ...


def measured_costs(
    mover: Measurable, *, kernel: bool, peers: Sequence[Driver] = (), folder: Path | None = None
) -> dict[Direction, Costs]:
    """What a mover's links cost: as kept in `folder`, else measured now with this mover, and then kept.

    kernel: whether it has one. peers: other devices that it writes; the dearest link stands for all of them.
    What can't be measured (no memory left, say) counts as in DEFAULT_COSTS, and is tried again next time.
    """
    driver, began = mover.driver, time.perf_counter()
    path = (folder or cache_folder()) / f"costs-{driver.uuid}.json"
    about = CostFile(driver.uuid, driver.version, __version__, kernel, {})
    kept = read(path, about)
    wanted: dict[str, tuple[Direction, Driver]] = {str(d): (d, driver) for d in Direction if d is not Direction.PEER}
    wanted |= {f"peer {other.uuid}": (Direction.PEER, other) for other in peers}
    found = {name: kept[name] for name in wanted if name in kept}
    for name in wanted.keys() - found.keys():
        direction, other = wanted[name]
        try:
            found[name] = measure(mover, direction, other, kernel=kernel)
        except (LayercastError, RuntimeError) as error:  # torch says RuntimeError where no memory is left
            _log.warning("copies %s could not be measured (%s); they go by an H100's figures", name, error)
    if found.keys() - kept.keys():
        write(path, msgspec.structs.replace(about, links={**kept, **found}))
        _log.info("copies measured in %.2f s: %s", time.perf_counter() - began, found)
    links = [costs for name, costs in found.items() if name.startswith("peer")]
    costs = {direction: found.get(direction, DEFAULT_COSTS[direction]) for direction in Direction}
    costs[Direction.PEER] = min(links, key=lambda link: link.kernel_gbps, default=costs[Direction.PEER])
    driver.bind()
    return costs if peers else {d: cost for d, cost in costs.items() if d is not Direction.PEER}


def read(path: Path, about: CostFile) -> Mapping[str, Costs]:
    """The costs in the file; none where it is missing, damaged, or of another device, driver, version or kernel."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=CostFile)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        _log.warning("%s is damaged (%s); copies are measured again", path, error)
        return {}
    return kept.links if msgspec.structs.replace(kept, links={}) == about else {}


def write(path: Path, kept: CostFile) -> None:
    """Keep it, whole or not at all; a folder that can't be written costs the next start a measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
        fresh.replace(path)
    except OSError as error:
        _log.warning("%s can't be written (%s); every start measures anew", path, error)


@contextmanager
def products(device: int) -> Iterator[None]:
    """Matrix products for as long as the measurements inside take."""
    import torch

    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        a = torch.ones(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda")
        out = torch.mm(a, a)
        torch.cuda.current_stream().synchronize()
        for _ in range(PRODUCTS):
            torch.mm(a, a, out=out)
        yield
        torch.cuda.current_stream().synchronize()


def measure(
    mover: Measurable, direction: Direction, other: Driver, *, kernel: bool, beside: Beside = products
) -> Costs:
    """One link's costs, in a tenth of a second or so. other: whose memory the device writes (its own, unless PEER).

    Over the way to the host a kernel is timed beside compute, which it collapses beside; between devices on quiet ones:
    there it is ten times as fast as the copy engine.
    Leaves the mover with costs that are good for nothing else. Raises OutOfMemory, DeviceFailed, DeadlineExceeded.
    """

    def us(way: Way, pieces: Pieces, batches: int = BATCHES) -> float:
        """Microseconds that a batch of many takes: what an order and its landing cost by themselves is left out."""
        mover.prefer({direction: only(way)[direction]})
        few, many = (_median_us(mover, [pieces] * count) for count in (batches, 4 * batches))
        return max((many - few) / 3, few / 10) / batches  # what is left of two times alike says nothing

    default = DEFAULT_COSTS[direction]
    with _memory(mover.driver, other, direction) as (source, target):
        gbps = LONG / us(Way.ENGINE, _pieces(np.array([source]), np.array([target]), LONG), 1) / 1e3
        up = direction is Direction.UP
        short, middle = _scattered(source, target, SHORT, up=up), _scattered(source, target, MIDDLE, up=up)
        piece_us = us(Way.ENGINE, short) / COUNT
        if not kernel:
            return dataclasses.replace(default, gbps=gbps, piece_us=piece_us)
        staged = direction in (Direction.UP, Direction.DOWN)
        row_us = us(Way.STAGED if staged else Way.KERNEL, short) / COUNT
        us(Way.KERNEL, middle)  # loads the kernel
        with beside(mover.driver.device) if staged else nullcontext():
            kernel_gbps = middle.nbytes / us(Way.KERNEL, middle) / 1e3
    return Costs(gbps, piece_us, row_us, kernel_gbps)


def _median_us(mover: Measurable, batches: Sequence[Pieces]) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        mover.submit_all(batches)[-1].wait(SOON_S)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * 1e6


@contextmanager
def _memory(driver: Driver, other: Driver, direction: Direction) -> Iterator[tuple[int, int]]:
    """(source, target): LONG bytes each, given back at the end."""
    with ExitStack() as stack:

        def take(owner: Driver, *, host: bool) -> int:
            owner.bind()
            address = owner.host_memory(LONG) if host else owner.device_memory(LONG)
            stack.callback(owner.drop_host_memory if host else owner.drop_device_memory, address)
            stack.callback(owner.bind)
            return address

        stack.callback(driver.bind)
        yield (
            take(driver, host=direction is Direction.UP),
            take(other, host=direction is Direction.DOWN),
        )


def _scattered(source: int, target: int, length: int, *, up: bool) -> Pieces:
    """Pieces that lie together on the side of the host, and apart and in reverse on the other."""
    nth = np.arange(COUNT, dtype=np.int64)
    together, apart = nth * length, 2 * nth[::-1] * length
    return _pieces(source + (together if up else apart), target + (apart if up else together), length)


def _pieces(at: Ints, to: Ints, length: int) -> Pieces:
    return Pieces.plain(at, to, np.full_like(at, length))
