"""The ground that copies are measured on: one device, a pool of blocks on it, a pinned slab, and what moves between.

Slots and blocks are random permutations, so that nothing merges. Does not know what is measured.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from layercast.bench.results import SOON_S, Start
from layercast.errors import Refused
from layercast.flow.batches import saved_apart, saved_together
from layercast.move.costs import Way, only
from layercast.move.cuda import CudaMover
from layercast.move.cuda_costs import measured_costs
from layercast.move.cuda_driver import Driver
from layercast.move.cuda_issue import Issue, compiled_issue, plain_issue
from layercast.move.cuda_pin import Pinning, near
from layercast.move.kernels.pieces import PieceKernel, compiled_or_none
from layercast.plan.batches import windows_of
from layercast.plan.pieces import CopyPlan, Pieces, Route, Series, route_between
from layercast.spec.groups import GroupKind, GroupSpec, Layout, layout_of
from layercast.spec.planes import PlaneKind, plane_of_tensor
from layercast.store.slab import Slab, slab_bytes

Ints = npt.NDArray[np.int64]
ENDLESS = 1 << 40
"""Bytes of a call whose pieces are never cut."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape: Llama-3.1-8B in bf16 unless said otherwise. block: tokens in one."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    hidden: int = 4096
    inner: int = 14336
    block: int = 16

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, K and V together."""
        return 2 * self.block * self.kv_heads * self.width * 2


@dataclass(frozen=True)
class Device:
    """One GPU: its driver, the copy kernel, a stream that computes and one that copies."""

    number: int
    driver: Driver
    kernel: PieceKernel | None
    compute: torch.cuda.Stream
    copying: torch.cuda.Stream

    @classmethod
    def of(cls, number: int = 0) -> "Device":
        """Raises Refused where there is no such device, or no driver."""
        if number >= torch.cuda.device_count():
            raise Refused(f"this needs {number + 1} CUDA devices and there are {torch.cuda.device_count()}")
        torch.cuda.set_device(number)
        torch.zeros(1, device="cuda")
        return cls(
            number, Driver(number), compiled_or_none(number), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        )

    @cached_property
    def plain(self) -> Issue:
        """The issuing loop in Python."""
        return plain_issue(self.driver.calls, self.driver.batch_attributes)

    @cached_property
    def compiled(self) -> Issue | None:
        """The compiled issuing loop; None without numba."""
        return _compiled(self.driver)

    def mover(self, way: Way | None = None, *, plain: bool = False, peers: "Sequence[Device]" = ()) -> CudaMover:
        """A mover that takes one way, or (None) chooses as an engine's would. peers: devices that it may write."""
        for peer in peers:
            self.driver.reach(peer.number)
        mover = CudaMover(self.driver, self.kernel, self.plain if plain else self.compiled)
        if way is None:
            costs = measured_costs(mover, kernel=self.kernel is not None, peers=[peer.driver for peer in peers])
        else:
            costs = only(way)
        mover.prefer(costs)
        return mover

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways that copies can go here."""
        return tuple(Way) if self.kernel else (Way.ENGINE,)


@dataclass(frozen=True)
class Ground:
    """Pools on the device, a slab in pinned memory, and which of its slots goes to which block."""

    device: Device
    shape: Shape
    blocks: int
    pools: Sequence[torch.Tensor]
    slab: Slab
    pinning: Pinning
    ids: Ints
    slots: Ints
    loading: Route
    saving: Route
    about: str

    def mover(self, way: Way | None = None, *, plain: bool = False) -> CudaMover:
        """As `Device.mover`; one that knows this slab, as an engine's does."""
        mover = self.device.mover(way, plain=plain)
        mover.follow(self.pinning)
        return mover

    def whole_mover(self) -> CudaMover | None:
        """A mover that hands long pieces over in one copy each; None without numba."""
        if (issue := _compiled(self.device.driver, ENDLESS)) is None:
            return None
        mover = CudaMover(self.device.driver, None, issue)
        mover.follow(self.pinning)
        return mover

    @property
    def nbytes(self) -> int:
        """Bytes of all layers of all blocks that move."""
        return self.shape.layers * self.blocks * self.shape.block_bytes

    @cached_property
    def host(self) -> npt.NDArray[np.int32]:
        """The slab's memory as int32, in an array that does not keep the slab open."""
        return np.ctypeslib.as_array((ctypes.c_int32 * (len(self.slab.owner) // 4)).from_address(self.base))

    @cached_property
    def base(self) -> int:
        """The slab's address."""
        return self.slab.layout.groups[0].planes_of(0)[0].base

    def step(self, *, up: bool, tokens: int | None = None, halves: bool = False) -> Series:
        """Plan a step layer by layer, as a worker does to load: its pieces, and where they lie in each layer.

        tokens: the first so many. halves: K and V of a block as two pieces each that lie apart.
        """
        series = layer_by_layer(self._plan(tokens, up=up))
        return msgspec.structs.replace(series, pieces=_halves(series.pieces)) if halves else series

    def parts(self, tokens: int | None = None) -> tuple[tuple[int, ...], ...]:
        """The layers that a worker saves together, of the first so many tokens (None: of all)."""
        layers, nbytes = self.shape.layers, self._count(tokens) * self.shape.layers * self.shape.block_bytes
        return windows_of(tuple(range(layers)), saved_together(layers, nbytes))

    def save(self, tokens: int | None = None) -> list[Series]:
        """Plan a step as a worker does to save: each of `parts`, which share what is alike in them."""
        plan, each = self._plan(tokens, up=False), self._count(tokens) * self.shape.block_bytes
        cuts = [saved_apart(plan.route, part, each) for part in self.parts(tokens)]
        return [series for cut in cuts for _, series, _ in plan.series(cut)]

    def _plan(self, tokens: int | None, *, up: bool) -> CopyPlan:
        count = self._count(tokens)
        ids, slots = self.ids[:count].tolist(), self.slots[:count].tolist()  # as an engine hands them over
        return self.loading.plan(slots, ids) if up else self.saving.plan(ids, slots)

    def _count(self, tokens: int | None) -> int:
        """Blocks of so many tokens."""
        return self.blocks if tokens is None else max(1, tokens // self.shape.block)

    def wanted(self, layer: int) -> npt.NDArray[np.int32]:
        """What the slots hold of one layer, int32 [blocks, words], in the order of `ids`."""
        words = self.shape.block_bytes // 4
        first = (self.slab.layout.groups[0].planes_of(layer)[0].base - self.base) // 4
        return self.host[first : first + self.blocks * words].reshape(self.blocks, words)[self.slots]

    def blank(self) -> None:
        """Zero the blocks, so that what is right in them has been loaded."""
        for pool in self.pools:
            pool.zero_()
        torch.cuda.synchronize()

    def arrived(self) -> bool:
        """Whether every block of the first, a middle and the last layer is what its slot holds, bit for bit."""
        return all(np.array_equal(found[self.ids], self.wanted(n)) for n, found in self._probes())

    def in_order(self) -> Series:
        """A piece a layer: its whole memory into the pool's first blocks, whatever slots and blocks were chosen."""
        step, zero = self.blocks * self.shape.block_bytes, np.zeros(1, np.int64)
        one = Pieces.plain(zero, zero, np.array([step], np.int64))
        ends = [(self.base + n * step, pool.data_ptr()) for n, pool in enumerate(self.pools)]
        return Series(one, np.array(ends), tuple(range(len(ends))))

    def arrived_in_order(self) -> bool:
        """Whether the first, a middle and the last layer are what `in_order` brings, bit for bit."""
        saved = self.host[: self.nbytes // 4].reshape(self.shape.layers, self.blocks, -1)
        return all(np.array_equal(found[: self.blocks], saved[n]) for n, found in self._probes())

    def _probes(self) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        """The first, a middle and the last layer, and what its pool holds: int32 [blocks, words]."""
        for n in (0, self.shape.layers // 2, self.shape.layers - 1):
            yield n, self.pools[n].view(torch.int32).cpu().numpy()

    def contiguous(self, *, up: bool) -> Start:
        """The limit: one long copy a layer, from or to pinned memory."""
        step, stream = self.blocks * self.shape.block_bytes, self.device.copying
        copies = []
        for n, pool in enumerate(self.pools):
            host = self.base + n * step
            inside = [at - host for at in self.pinning.cuts if host < at < host + step]
            for first, last in pairwise([0, *inside, step]):
                ends = (pool.data_ptr() + first, host + first)
                copies.append((*(ends if up else ends[::-1]), last - first))
        copy, check = self.device.driver.calls.copy, self.device.driver.check

        def start() -> Callable[[], None]:
            for to, from_, nbytes in copies:
                check("a contiguous copy", copy(to, from_, nbytes, stream.cuda_stream))
            return stream.synchronize  # type: ignore[no-any-return]

        return start


@contextmanager
def ground(device: Device, shape: Shape, tokens: int) -> Iterator[Ground]:
    """Pools and a pinned slab for so many tokens, given back at the end. Raises Refused where pinning is refused."""
    torch.cuda.set_device(device.number)
    blocks = tokens // shape.block
    size = (blocks + blocks // 4, shape.block_bytes // 2)
    pools = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(shape.layers)]
    engine, began = engine_layout(shape, pools), time.perf_counter()
    with near(device.driver.pci) as node:
        slab = Slab.create(engine, slab_bytes(engine, (blocks,)))
    faulted = time.perf_counter()
    base = slab.layout.groups[0].planes_of(0)[0].base
    pinning = Pinning(device.driver, base, len(slab.owner))
    try:
        pinning.wait(SOON_S)
        if pinning.refusal:
            raise Refused(pinning.refusal)
        pinned = time.perf_counter()
        about = (
            f"slab: {len(slab.owner) / 2**30:.2f} GiB in {faulted - began:.2f} s, pinned in {pinned - faulted:.2f} s; "
            f"{huge_bytes(base) / len(slab.owner):.0%} in huge pages; NUMA node {node if node >= 0 else 'only one'}"
        )
        choose = np.random.default_rng(0)
        ids, slots = choose.permutation(size[0])[:blocks], choose.permutation(blocks)
        ours, theirs = slab.layout.groups[0], engine.groups[0]
        routes = (route_between(ours, theirs), route_between(theirs, ours))
        made = Ground(device, shape, blocks, pools, slab, pinning, ids, slots, *routes, about)
        made.host[:] = choose.integers(-(2**31), 2**31, len(made.host), np.int32)
        yield made
    finally:
        torch.cuda.synchronize()
        pinning.close(SOON_S)
        slab.close()
        pools.clear()
        torch.cuda.empty_cache()


def _compiled(driver: Driver, *longest: int) -> Issue | None:
    """The compiled issuing loop; None without numba. longest: of a call whose pieces are cut, in bytes."""
    try:
        return compiled_issue(driver.calls, driver.batch_attributes, *longest)
    except ImportError:
        return None


def huge_bytes(address: int) -> int:
    """Bytes of this process's mapping at the address that lie in huge pages; 0 where the system does not say."""
    smaps = Path("/proc/self/smaps")
    inside = False
    for line in smaps.read_text().splitlines() if smaps.is_file() else ():
        first, _, rest = line.partition("-")
        if rest and all(digit in "0123456789abcdef" for digit in first):
            inside = int(first, 16) <= address < int(rest.split()[0], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def engine_layout(shape: Shape, pools: Sequence[torch.Tensor]) -> Layout:
    """The pools as an engine would register them: a tensor a layer, K and V of a block together."""
    planes = [
        plane_of_tensor(
            f"layers.{n}",
            n,
            PlaneKind.KV,
            "bfloat16",
            pool.data_ptr(),
            tuple(pool.shape),
            tuple(pool.stride()),
            ("block", "content"),
        )
        for n, pool in enumerate(pools)
    ]
    return layout_of([GroupSpec("full", GroupKind.FULL, shape.block, tuple(range(shape.layers)))], planes)


def layer_by_layer(plan: CopyPlan) -> Series:
    """What a plan moves, one layer a turn; for layers that are alike."""
    ((_, series, _),) = plan.series(tuple((layer,) for layer in plan.layers))
    return series


def _halves(pieces: Pieces) -> Pieces:
    """Every piece as two of half the length, which swap places on the device so that they can't merge there."""
    length = np.repeat(pieces.length // 2, 2)
    second = np.tile([0, 1], len(pieces)) * length
    source, target = np.repeat(pieces.source, 2) + second, np.repeat(pieces.target, 2) + (length - second)
    return Pieces.plain(source, target, length)
