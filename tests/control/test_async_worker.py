"""A worker over a device that carries its calls out later: every forward reads what is right, whatever the schedule."""

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import pytest
from async_device import AsyncDevice
from host_device import KERNEL
from hypothesis import given, settings
from hypothesis import strategies as st

from layercast.config import Config
from layercast.control.node import open_worker
from layercast.flow import batches
from layercast.flow.orders import BlockPairs, LoadEnd, LoadOrder, SaveOrder, StepOrders
from layercast.move import cuda_lane
from layercast.move.costs import Direction, Way, only
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.testing.oracle import ByteEngine, content

LAYERS, BLOCKS, TOKENS, TOKEN_BYTES, SOON_S = 4, 24, 4, 128, 10.0
BLOCK_BYTES = TOKENS * TOKEN_BYTES
SPECS = [GroupSpec("full", GroupKind.FULL, TOKENS, tuple(range(LAYERS)))]
STORED, RECOMPUTED = 8, -1
LONGEST = 32
"""Launches that a stream's queue holds."""
WAYS = {way: only(way) for way in Way}
SMALL = {Direction.UP: (3, 4 * BLOCK_BYTES), Direction.DOWN: (2, 4 * BLOCK_BYTES)}
"""A pace that a few blocks are enough to notice."""


@cache
def kv(name, layer):
    """What the block of that name holds in a layer."""
    return content([name], layer, BLOCK_BYTES)


@dataclass(eq=False)
class Load:
    """Blocks of a request; they are the engine's again once it has been told what came of it, and needs it no more."""

    blocks: list[int]
    names: list[int]
    told: bool = False
    needed: bool = True


@dataclass(eq=False)
class Save:
    """Blocks that a forward writes, and slots for them."""

    blocks: list[int]
    slots: list[int]
    names: range


class Engine:
    """An engine on a device, and what it knows of its blocks and slots; a forward reads when its stream gets there."""

    def __init__(self, device, worker, memory):
        self.device, self.worker, self.memory = device, worker, memory
        self.blocks, self.slots = list(range(BLOCKS)), list(range(worker.ways.slots[0]))
        """Those that nothing is in, or on its way to."""
        self.stored = [(self.slots.pop(), name) for name in range(STORED)]
        for slot, name in self.stored:
            for layer in range(LAYERS):
                worker.ways.slab.write(0, slot, layer, kv(name, layer).tobytes())
        self.names = self.steps = 0
        self.loads, self.saves = {}, {}
        """By request, those that have not been told or are still needed."""
        self.come = []
        """Requests whose loads have come in the background, for the next forward to read."""
        self.ends, self.spoilt, self.wrong = {}, set(), []
        """How each request ended, those that have failed, and (request, layer, block) of what was not right as read."""

    # ---- orders ----

    def load(self, count, window=1, hidden=0):
        """A load of up to so many blocks of what is stored."""
        count = min(count, len(self.blocks))
        if not count:
            return []
        rows, self.stored = self.stored[:count], self.stored[count:] + self.stored[:count]
        request, slots = f"load-{self.steps}-{len(self.loads)}", tuple(slot for slot, _ in rows)
        load = self.loads[request] = Load(self._taken(self.blocks, len(rows)), [name for _, name in rows])
        pairs = (BlockPairs(0, slots, tuple(load.blocks)),)
        return [LoadOrder(request, request, TOKENS * len(slots), pairs, window, hidden * len(slots) * BLOCK_BYTES)]

    def save(self, count):
        """A save of up to so many blocks that the next forward writes."""
        count = min(count, len(self.blocks), len(self.slots))
        if not count:
            return []
        request, first, self.names = f"save-{self.steps}-{len(self.saves)}", STORED + self.names, self.names + count
        blocks, slots = self._taken(self.blocks, count), self._taken(self.slots, count)
        self.saves[request] = Save(blocks, slots, range(first, first + count))
        return [SaveOrder(request, request, (BlockPairs(0, tuple(slots), tuple(blocks)),))]

    @staticmethod
    def _taken(free, count):
        """Those that were given back last."""
        return [free.pop() for _ in range(count)]

    # ---- forwards ----

    def begin(self, loads=(), background=(), saves=(), aborts=()):
        self.steps += 1
        joins, self.come = tuple(self.come), []
        self.reads, self.writes = [*(load.request for load in loads), *joins], [save.request for save in saves]
        rest = {"background": tuple(background), "aborts": tuple(aborts), "joins": joins}
        orders = StepOrders(self.steps, tuple(loads), tuple(saves), **rest)
        self.step = self.worker.begin(orders, after=(self.worker.mover.mark(),))

    def forward(self, launches=0, at_layer=lambda _: None, seconds=0.0):
        """One layer after another, with so many launches more in each, and one that takes so long."""
        for layer in range(LAYERS):
            at_layer(layer)
            self.step.wait(layer)
            for _ in range(launches):
                self.device.launch()
            self.device.launch(seconds=seconds)
            for request in self.reads:
                load = self.loads[request]
                self.device.launch(partial(self._look, request, layer, load.blocks, load.names))
            for request in self.writes:
                save = self.saves[request]
                self.device.launch(partial(self._write, layer, save.blocks, save.names))
            self.step.written(layer)

    def end(self):
        """The forward is over; what has failed in it is computed into the same blocks, as an engine does."""
        report = self.step.end(SOON_S)
        self.spoilt.update(report.failed)
        for request in report.failed:
            blocks = self.loads[request].blocks
            for layer in range(LAYERS):
                self.device.launch(partial(self._write, layer, blocks, [RECOMPUTED] * len(blocks)))
                self.device.launch()
                self.device.launch(partial(self._look, None, layer, blocks, [RECOMPUTED] * len(blocks)))
        self.take(report)
        for request in self.reads:
            self._drop(request)
        self.listen()
        return report.failed

    def abort(self, request):
        """Nobody needs it any more."""
        self.worker.abort(request)
        if request in self.come:
            self.come.remove(request)
            self._drop(request)

    def listen(self):
        """Learn what has come in the background, and what will not."""
        for request, end in self.worker.awaited():
            if end == LoadEnd.LANDED:
                self.come.append(request)
            else:
                self._drop(request)

    def take(self, report):
        """Learn what has ended."""
        for outcome in report.loads:
            self.ends[outcome.request] = outcome.end
            self.loads[outcome.request].told = True
            self._give_back(outcome.request)
        for outcome in report.saves:
            self.ends[outcome.request], save = outcome.saved, self.saves.pop(outcome.request)
            self.blocks += save.blocks
            if outcome.saved:
                self.stored += zip(save.slots, save.names, strict=True)
            else:
                self.slots += save.slots

    def settle(self):
        """Everything has ended, and has been told; what has come is read."""
        self.worker.quiet(SOON_S)
        self.take(self.worker.report(-1))
        self.listen()
        if self.come:
            self.begin()
            self.forward()
            self.end()
            self.settle()

    def check(self):
        """Forwards have read what they should, slots hold what they should, and all has been given back."""
        self.device.synchronize()
        assert self.device.troubles == []
        assert [what for what in self.wrong if what[0] not in self.spoilt] == []
        slab, slots = self.worker.ways.slab, [slot for slot, _ in self.stored]
        for slot, name in self.stored:
            assert all(slab.read(0, slot, layer) == kv(name, layer).tobytes() for layer in range(LAYERS))
        assert sorted(self.blocks) == list(range(BLOCKS))
        assert sorted(self.slots + slots) == list(range(self.worker.ways.slots[0]))
        assert (self.loads, self.saves) == ({}, {})
        assert self.worker.idle

    def _drop(self, request):
        """No forward reads it any more."""
        self.loads[request].needed = False
        self._give_back(request)

    def _give_back(self, request):
        load = self.loads[request]
        if load.told and not load.needed:
            del self.loads[request]
            self.blocks += load.blocks

    # ---- on the device ----

    def _look(self, request, layer, blocks, names):
        for block, name in zip(blocks, names, strict=True):
            if not (self.memory.arrays[layer][block] == kv(name, layer)).all():
                self.wrong.append((request, layer, block))

    def _write(self, layer, blocks, names):
        for block, name in zip(blocks, names, strict=True):
            self.memory.arrays[layer][block] = kv(name, layer)


def files():
    return sorted(os.listdir("/proc/self/fd"))


@contextmanager
def engine_over(device, way=Way.ENGINE, **settings):
    """An engine and its worker; behind it all is as it was."""
    threads, open_files = threading.active_count(), files()
    memory = ByteEngine(SPECS, BLOCKS, TOKEN_BYTES)
    config = Config(**{"host_bytes": 1 << 17, "kv_recompute_threshold": 0, "layer_wait_ms": 5000, **settings})
    with (
        device.in_place_of_cuda(device.compute, kernel=KERNEL, costs=WAYS[way]),
        open_worker(memory.layout, config, keep=memory.arrays.values(), rank=1, ranks=2) as worker,
    ):
        yield Engine(device, worker, memory)
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.join(SOON_S)  # of a load that the closed mover has refused
    assert threading.active_count() == threads
    assert files() == open_files


@pytest.fixture
def device():
    device = AsyncDevice(LONGEST, gb_s=0.02)
    yield device
    device.close()


@pytest.fixture
def small_paces(monkeypatch):
    """As small as the engine's blocks: paces, and the steps whose saves go in windows, and layers that go apart."""
    monkeypatch.setattr(cuda_lane, "PACES", SMALL)
    monkeypatch.setattr(batches, "AT_ONCE_BYTES", 4 * LAYERS * BLOCK_BYTES)
    monkeypatch.setattr(batches, "SAVE_PARTS", 2)
    monkeypatch.setattr(batches, "LAYER_BYTES", 3 * BLOCK_BYTES)


@pytest.mark.parametrize("window", [0, 1, 2])
def test_a_forward_of_more_launches_than_a_queue_holds_gets_its_load(device, monkeypatch, window):
    """The first layer's blocks are handed over one by one, 4 ms each, so that the queue is full long before."""
    monkeypatch.setattr(cuda_lane, "PACES", {Direction.UP: (1, BLOCK_BYTES)})
    device.gb_s = BLOCK_BYTES / 0.004 / 1e9
    with engine_over(device, layerwise_max_transfer_blocks=1) as engine:
        engine.begin(engine.load(8, window))
        engine.forward(launches=2 * LONGEST)
        assert engine.end() == ()
        engine.settle()
        engine.check()
        assert [*engine.ends.values()] == [LoadEnd.LANDED]


def test_a_forward_that_waits_for_a_load_is_launched_long_before_its_last_layers_have_come(device, monkeypatch):
    """Whatever the pace: what a forward launches behind its last layer must not be late."""
    monkeypatch.setattr(cuda_lane, "PACES", {Direction.UP: (1, BLOCK_BYTES)})
    device.gb_s = BLOCK_BYTES / 0.01 / 1e9
    with engine_over(device) as engine:
        engine.begin(engine.load(8))
        engine.forward()
        arm = engine.worker.mover._arm(Direction.UP)
        assert not arm.lane.tally.reached(LAYERS - 1), "80 ms a layer"
        engine.end()
        engine.settle()
        engine.check()


def test_a_forward_is_over_before_its_copies_are_and_reads_them_all_the_same(device):
    with engine_over(device) as engine:
        device.launch(seconds=0.1)
        engine.begin(engine.load(4))
        engine.forward()
        report = engine.step.end()
        assert (report.failed, report.loads, engine.wrong) == ((), (), [])
        assert not device.happened(engine.worker.mover.mark().event.handle), "or this shows nothing"
        engine._drop(*engine.loads)
        engine.settle()
        engine.check()


SETTINGS = [
    {},
    {"layerwise_max_transfer_blocks": 2},
    {"use_layerwise": False},
    {"h2d_stagger_us": 500},
    {"h2d_stagger_us": 20_000, "layer_wait_ms": 10},
]
few = st.integers(0, 4)
layers = st.integers(0, LAYERS - 1)
STEPS = st.fixed_dictionaries(
    {
        "loads": st.lists(few, max_size=3),
        "background": st.lists(st.tuples(few, st.integers(0, LAYERS)), max_size=2),
        "saves": st.lists(few, max_size=2),
        "window": st.integers(0, 2),
        "before_s": st.sampled_from([0, 0.002]),
        "between_s": st.sampled_from([None, 0, 0.002]),
        "launches": st.sampled_from([0, 1, LONGEST]),
        "layer_s": st.sampled_from([0, 0.002]),
        "aborts": st.lists(st.tuples(layers, st.integers(0, 5)), max_size=1),
        "refused": st.none() | st.tuples(st.integers(-1, LAYERS - 1), layers),
        "breaks": st.none() | st.none() | layers,
    }
)


class Broke(Exception):
    """A forward has raised."""


def run(engine, step, close_at=None):
    """One step of a schedule; close_at: the layer before which the mover is closed."""
    device, failing = engine.device, engine.device.failing
    device.launch(seconds=step["before_s"])

    def at_layer(layer):
        if close_at == layer:
            engine.worker.mover.close(SOON_S)
        if step["refused"] is not None:
            first, count = step["refused"]
            failing.clear() if layer == first + count else None
            failing.update({"copy_batch": 1, "copy": 1, "launch": 1} if layer == first and count else {})
        for _, nth in [abort for abort in step["aborts"] if abort[0] == layer and engine.loads]:
            engine.abort([*engine.loads][nth % len(engine.loads)])
        if step["breaks"] == layer:
            raise Broke

    at_layer(-1)
    engine.begin(
        [order for count in step["loads"] for order in engine.load(count, step["window"])],
        [order for count, hidden in step["background"] for order in engine.load(count, step["window"], hidden)],
        [order for count in step["saves"] for order in engine.save(count)],
    )
    if step["between_s"] is not None:  # begun early: inputs are prepared
        device.launch(seconds=step["between_s"])
    try:
        engine.forward(step["launches"], at_layer, step["layer_s"])
    except Broke:
        engine.step.abandon()
    failing.clear()
    engine.end()


@pytest.mark.usefixtures("small_paces")
@settings(deadline=None, max_examples=30)
@given(
    st.lists(STEPS, max_size=6),
    st.sampled_from(Way),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from(SETTINGS),
    st.none() | layers,
    st.sampled_from([0, 1, 3]),
)
def test_whatever_the_schedule_forwards_read_what_is_right_and_everything_is_given_back(
    steps, way, gb_s, settings, close_at, queues
):
    device = AsyncDevice(LONGEST, gb_s, queues=queues)
    with engine_over(device, way, **settings) as engine:
        for nth, step in enumerate(steps):
            run(engine, step, close_at if nth + 2 == len(steps) else None)
        engine.settle()
        engine.check()
    del engine
    device.close()
