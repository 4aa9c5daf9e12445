"""Loads of real sizes, a gigabyte and more, under limits. Addresses only: nothing of it is allocated or copied."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from layercast.config import Config
from layercast.flow.batches import AT_ONCE_BYTES, LAYER_BYTES, SAVE_PARTS, Ways
from layercast.flow.orders import BlockPairs, LoadEnd, LoadOrder, SaveOrder, StepOrders
from layercast.flow.worker import Worker
from layercast.move.base import Mover
from layercast.move.cuda_ways import rows_of
from layercast.move.flights import HostFlight, landed
from layercast.move.gates import CpuGate
from layercast.plan.pieces import Series
from layercast.spec.groups import GroupKind, GroupSpec, Layout, layout_of
from layercast.spec.planes import PlaneKind, plane_of_tensor

LAYERS, SLOTS, BLOCK_BYTES = 32, 1200, 32 << 10
GIB = 1 << 30


def layout_at(base: int, groups: tuple[range, ...] = (range(LAYERS),), *, block_major: bool = False) -> Layout:
    """Per-layer planes of 16-token blocks, 32 KiB each: 1,024 blocks in 32 layers are a gigabyte.

    block_major: all layers of a block lie together.
    """
    layer_bytes, block_bytes = (
        (BLOCK_BYTES, LAYERS * BLOCK_BYTES) if block_major else (SLOTS * BLOCK_BYTES, BLOCK_BYTES)
    )
    planes = [
        plane_of_tensor(
            f"layers.{layer}.kv",
            layer,
            PlaneKind.KV,
            "uint8",
            base + layer * layer_bytes,
            (SLOTS, BLOCK_BYTES),
            (block_bytes, 1),
            ("block", "content"),
        )
        for layer in range(LAYERS)
    ]
    return layout_of([GroupSpec(str(ours), GroupKind.FULL, 16, tuple(ours)) for ours in groups], planes)


@dataclass
class Addresses:
    """A slab that is only where it would be."""

    layout: Layout = field(default_factory=lambda: layout_at(1 << 45))
    digests: tuple = (np.zeros((LAYERS, SLOTS), np.uint64),)


class NotingMover(Mover):
    """Notes what is submitted and lands it, oldest first, when the test says so."""

    def __init__(self):
        self.batches, self.flights = [], []

    def submit(self, pieces, *, after=(), keep=()):
        self.batches.append(pieces)
        self.flights.append(HostFlight())
        return self.flights[-1]

    def land_next(self):
        next(flight for flight in self.flights if not flight.done).land()

    @property
    def in_flight(self):
        return sum(not flight.done for flight in self.flights)

    def digest(self, ranges, *, after=()):
        raise NotImplementedError

    def mark(self):
        return landed()

    @property
    def staging_bytes(self):
        return 0

    def close(self, timeout_s):
        pass


def worker_of(**settings):
    engine, mover = layout_at(1 << 40), NotingMover()
    config = Config(host_bytes=1 << 20, verify=False, **settings)
    return Worker(Ways.between(engine, Addresses(), config), mover, CpuGate()), mover, engine


def load(name, slots, blocks, window):
    return LoadOrder(name, name, 16 * len(slots), (BlockPairs(0, tuple(slots), tuple(blocks)),), window)


def scattered(count):
    """Blocks as a used pool leaves them: no two are neighbours on both sides."""
    return np.random.default_rng(1).permutation(1100)[:count].tolist()


@pytest.mark.parametrize("begun", [0, 1, 7, 50])
@pytest.mark.parametrize("window", [0, 1, 4], ids=["bulk", "layerwise", "window of 4"])
@pytest.mark.parametrize("limit", [4 << 20, (16 << 20) - 7])
def test_layer_0_of_a_small_load_waits_for_at_most_two_batches_of_a_gigabyte(window, limit, begun):
    """With the depth that nobody has set, from any point of the large load, contiguous or not."""
    for blocks in (range(1024), scattered(1024)):
        worker, mover, engine = worker_of(layerwise_max_transfer_bytes=limit)
        worker.begin(StepOrders(0, (load("large", range(1024), blocks, window),)))
        for _ in range(begun):
            mover.land_next()
        landed_before = sum(flight.done for flight in mover.flights)
        worker.begin(StepOrders(1, (load("small", [1150], [1150], window),)))
        small = engine.groups[0].planes_of(0)[0].base + 1150 * BLOCK_BYTES
        while not any(small in batch.target for batch in mover.batches):
            mover.land_next()
        place = next(nth for nth, batch in enumerate(mover.batches) if small in batch.target)
        assert place - landed_before <= 2
        while mover.in_flight:
            mover.land_next()
        assert sum(batch.nbytes for batch in mover.batches) == GIB + LAYERS * BLOCK_BYTES
        assert max(batch.nbytes for batch in mover.batches) <= limit
        assert {outcome.end for outcome in worker.report(2).loads} == {LoadEnd.LANDED}


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_at_most_depth_batches_of_at_most_the_limit_are_in_flight_all_along(depth):
    """So what a mover may have to stage is bounded by both, however large the load is."""
    limit = 8 << 20
    worker, mover, _ = worker_of(layerwise_prefetch_layers=depth, layerwise_max_transfer_bytes=limit)
    worker.begin(StepOrders(0, (load("large", range(1024), scattered(1024), 1),)))
    while mover.in_flight:
        assert mover.in_flight <= depth
        under_way = [b.nbytes for b, f in zip(mover.batches, mover.flights, strict=True) if not f.done]
        assert sum(under_way) <= depth * limit
        mover.land_next()
    assert sum(batch.nbytes for batch in mover.batches) == GIB


def test_a_block_larger_than_the_byte_limit_is_split():
    worker, mover, _ = worker_of(layerwise_max_transfer_bytes=BLOCK_BYTES // 3, layerwise_max_transfer_blocks=1)
    worker.begin(StepOrders(0, (load("one", [5], [9], 0),)))
    while mover.in_flight:
        mover.land_next()
    assert max(batch.nbytes for batch in mover.batches) <= BLOCK_BYTES // 3
    assert sum(batch.nbytes for batch in mover.batches) == LAYERS * BLOCK_BYTES
    assert len(mover.batches) == LAYERS * 4


def test_without_limits_a_gigabyte_in_bulk_is_one_batch():
    worker, mover, _ = worker_of()
    worker.begin(StepOrders(0, (load("large", range(1024), range(1024), 0),)))
    assert [batch.nbytes for batch in mover.batches] == [GIB]
    mover.land_next()


@pytest.mark.parametrize("slots", [1, 100, 1000])
@pytest.mark.parametrize(("on_device", "layerwise"), [(True, True), (True, False), (False, True)])
def test_a_device_saves_few_bytes_at_once_and_many_in_some_parts(slots, on_device, layerwise):
    worker, _, engine = worker_of(use_layerwise=layerwise)
    ways = replace(worker.ways, on_device=on_device)
    order = SaveOrder("s", "r", (BlockPairs(0, tuple(range(slots)), tuple(range(slots))),))
    few = ways.sizes[0] * slots <= AT_ONCE_BYTES
    windows = set(ways.save_windows([order]).values())
    assert sorted(layer for window in windows for layer in window) == list(engine.layers)
    most = {(True, True): 1 if few else SAVE_PARTS, (True, False): 1, (False, True): len(engine.layers)}
    assert len(windows) <= most[on_device, layerwise]
    assert (len(windows) > 1) == (layerwise and not (on_device and few))
    halves = [BlockPairs(0, order.pairs[0].blocks[nth::2], order.pairs[0].slots[nth::2]) for nth in range(2)]
    for split in ([SaveOrder("s", "r", tuple(halves))], [SaveOrder("s", "r", (half,)) for half in halves]):
        assert set(ways.save_windows(split).values()) == windows


@pytest.mark.parametrize("slots", [1, 100, LAYER_BYTES // BLOCK_BYTES - 1, LAYER_BYTES // BLOCK_BYTES, 1000])
@pytest.mark.parametrize(
    ("on_device", "settings"),
    [
        (True, {}),
        (False, {}),
        (False, {"use_layerwise": False}),
        (True, {"layerwise_max_transfer_blocks": 64}),
    ],
)
def test_a_device_saves_each_long_layer_as_a_part_that_shares_its_pieces_with_all(slots, on_device, settings):
    worker, _, engine = worker_of(**settings)
    ways = replace(worker.ways, on_device=on_device)
    order = SaveOrder("s", "r", (BlockPairs(0, tuple(scattered(slots)), tuple(range(slots))),))
    windows = [*dict.fromkeys(ways.save_windows([order]).values())]
    batches = ways.save_batches(ways.saving_of([order]), [(window, landed()) for window in windows])
    assert sum(batch.nbytes for batch in batches) == slots * BLOCK_BYTES * LAYERS
    assert sorted({layer for batch in batches for layer in batch.layers}) == list(engine.layers)
    apart = on_device and not ways.limits and slots * BLOCK_BYTES >= LAYER_BYTES
    if apart:
        assert [batch.pieces.turns for batch in batches] == windows
        assert len({id(batch.pieces.pieces.table) for batch in batches}) == 1
        assert len(batches) == SAVE_PARTS
    elif not ways.limits:
        assert [len(batch.pieces) for batch in batches] == [1] * len(windows)
    assert all(max(batch.parts.values()) < len(parts_of(batch.pieces)) for batch in batches)
    moved = sorted(each for batch in batches for part in parts_of(batch.pieces) for each in words_of(part))
    (plan,) = ways.save_plans([order]).values()
    assert moved == sorted(each for layer in engine.layers for each in words_of(plan.layer(layer)))


def test_where_all_layers_of_a_block_lie_together_a_device_saves_those_of_a_window_in_one_copy():
    engine, slab = layout_at(1 << 40, block_major=True), Addresses(layout_at(1 << 45, block_major=True))
    ways = Ways.between(engine, slab, Config(host_bytes=1 << 20, verify=False), on_device=True)
    order = SaveOrder("s", "r", (BlockPairs(0, tuple(scattered(1000)), tuple(range(1000))),))
    windows = [*dict.fromkeys(ways.save_windows([order]).values())]
    batches = ways.save_batches(ways.saving_of([order]), [(window, landed()) for window in windows])
    assert [batch.pieces.size for batch in batches] == [(GIB * 1000 // 1024 // SAVE_PARTS, 1000)] * SAVE_PARTS


@pytest.mark.parametrize(
    "windows", [[(0, 1, 2, 3, 4, 5, 6, 7)], [(8, 9), (0, 1, 2, 5, 6, 7, 16, 17)]], ids=["all", "swept"]
)
@pytest.mark.parametrize(("many", "few"), [(1000, 1), (256, 255), (300, 0), (256, 256)])
def test_of_groups_each_has_its_layers_apart_if_these_are_long_themselves(windows, many, few):
    groups = range(0, LAYERS, 2), range(1, LAYERS, 2)
    slab = Addresses(layout_at(1 << 45, groups))
    ways = Ways.between(layout_at(1 << 40, groups), slab, Config(host_bytes=1 << 20, verify=False), on_device=True)
    pairs = [BlockPairs(group, tuple(range(count)), tuple(range(count))) for group, count in enumerate((many, few))]
    save = ways.saving_of([SaveOrder("s", "r", tuple(pair for pair in pairs if pair.blocks))])
    written = {window: landed() for window in windows}
    batches = ways.save_batches(save, [*written.items()])
    assert all(
        batch.after == (written[window],) for batch in batches for window in windows if batch.layers[0] in window
    )
    layers = sorted(layer for window in windows for layer in window)
    for group, count in enumerate((many, few)):
        ours = [batch for batch in batches if batch.group == group]
        moved = [layer for layer in layers if count and layer in groups[group]]
        assert sorted(layer for batch in ours for layer in batch.layers) == moved
        assert sum(batch.nbytes for batch in ours) == len(moved) * count * BLOCK_BYTES
        long = count * BLOCK_BYTES >= LAYER_BYTES
        assert all(len(batch.pieces) == (len(batch.layers) if long else 1) for batch in ours)


def parts_of(pieces):
    return [*pieces] if isinstance(pieces, Series) else [pieces]


def words_of(pieces):
    """(source, target) of each 16 KiB that they copy."""
    for source, target, length in rows_of(pieces).table.T.tolist():
        for at in range(0, length, BLOCK_BYTES // 2):
            yield source + at, target + at
