"""The worker's pipelines: deadlines, order, isolation, depth."""

import threading
import time
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

from layercast.config import Config
from layercast.errors import DeadlineExceeded, DeviceFailed, LayercastError
from layercast.flow.batches import Ways
from layercast.flow.orders import BlockPairs, LoadEnd, LoadOrder, SaveOrder, StepOrders
from layercast.flow.worker import Worker
from layercast.move.base import MoverOver
from layercast.move.cpu import CpuMover
from layercast.move.flights import HostFlight
from layercast.move.gates import CpuGate
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.store.slab import Slab
from layercast.testing.oracle import ByteEngine

LAYERS, BLOCKS = 5, 32


class ValveMover(MoverOver):
    """A real mover whose copies wait until the test lets them go, and that notes what was submitted."""

    def __init__(self):
        super().__init__(CpuMover())
        self.valve, self.log, self.threads = threading.Event(), [], []
        self.valve.set()
        self.broken = set()

    def submit(self, pieces, *, after=(), keep=()):
        number = len(self.log)
        self.log.append(pieces)
        return self._mover.submit(pieces, after=(self._held(number), *after), keep=keep)

    def _held(self, number):
        flight = HostFlight()

        def go():
            self.valve.wait(20)
            flight.fail(LayercastError("the link broke")) if number in self.broken else flight.land()

        thread = threading.Thread(target=go)
        thread.start()
        self.threads.append(thread)
        return flight

    def close(self, timeout_s):
        self.valve.set()
        self._mover.close(timeout_s)
        for thread in self.threads:
            thread.join(timeout_s)


@contextmanager
def worker_of(specs=None, rank=0, **settings):
    specs = specs or [GroupSpec("full", GroupKind.FULL, 4, tuple(range(LAYERS)))]
    config = Config(**{"host_bytes": 1 << 20, "kv_recompute_threshold": 0, "verify": False, **settings})
    engine, threads = ByteEngine(specs, BLOCKS), threading.active_count()
    slab, mover = Slab.create(engine.layout, config.host_bytes), ValveMover()
    try:
        yield Worker(Ways.between(engine.layout, slab, config, rank=rank), mover, CpuGate()), engine, mover
    finally:
        mover.close(5)
        slab.close()
    assert threading.active_count() == threads


def load(name, slots, blocks, window=1, group=0):
    return LoadOrder(name, name, 4 * len(slots), (BlockPairs(group, tuple(slots), tuple(blocks)),), window)


def forward(step, layers=LAYERS):
    for layer in range(layers):
        step.wait(layer)
        step.written(layer)
    return step.end()


def settle(worker):
    worker.issuer.wait_idle(5)
    return worker.report(99)


def test_layer_0_of_four_requests_is_issued_before_any_layer_1():
    with worker_of(layerwise_prefetch_layers=1) as (worker, engine, mover):
        mover.valve.clear()
        loads = tuple(load(f"r{i}", range(i * 4, i * 4 + 4), range(i * 4, i * 4 + 4)) for i in range(4))
        step = worker.begin(StepOrders(0, loads))
        mover.valve.set()
        report = forward(step)
        assert not report.failed
        base = [engine.arrays[layer].ctypes.data for layer in range(LAYERS)]
        size = engine.arrays[0].nbytes
        layers = [next(k for k in range(LAYERS) if base[k] <= p.target[0] < base[k] + size) for p in mover.log]
        assert layers == sorted(layers)
        assert layers.count(0) == 4


def test_a_load_takes_its_time_from_before_it_was_handed_over(monkeypatch):
    """Whoever hands it over may be held up while it lands, and a link must not look the quicker for that."""
    with worker_of() as (worker, _, mover):
        at_once = mover.submit_all

        def held_up(batches, **orders):
            flights = at_once(batches, **orders)
            flights[-1].wait(5)
            time.sleep(0.02)
            return flights

        monkeypatch.setattr(mover, "submit_all", held_up)
        report = forward(worker.begin(StepOrders(0, (load("a", [0], [0], window=0),))))
        (outcome,) = [*report.loads, *settle(worker).loads]
        assert outcome.end is LoadEnd.LANDED
        assert outcome.transfer_s >= 0.02


def test_no_more_than_depth_batches_are_ever_in_flight():
    for depth in (1, 2, 3):
        with worker_of(layerwise_prefetch_layers=depth) as (worker, _, mover):
            mover.valve.clear()
            step = worker.begin(StepOrders(0, (load("a", range(8), range(8)),)))
            assert len(mover.log) == depth
            mover.valve.set()
            assert not forward(step).failed
            assert worker.issuer.peak_in_flight == depth
            assert mover.staging_bytes == 0


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_loads_of_a_rank_start_as_much_later_as_it_has_ranks_before_it(rank):
    with worker_of(h2d_stagger_us=40_000, rank=rank) as (worker, engine, _):
        saved = worker.ways.slab
        for slot in range(9):
            saved.write(0, slot, LAYERS - 1, bytes([slot + 1]) * len(saved.read(0, slot, LAYERS - 1)))
        began = time.monotonic()
        step = worker.begin(StepOrders(0, (load("a", range(8), range(8)), load("b", [8], [9]))))
        assert time.monotonic() - began < 0.04, "nobody but the copies waits"
        assert not forward(step).failed
        assert time.monotonic() - began >= rank * 0.04
        assert [set(engine.arrays[LAYERS - 1][block].tolist()) for block in (7, 9)] == [{8}, {9}]


def test_a_small_load_waits_for_at_most_two_batches_of_a_huge_one():
    with worker_of(layerwise_prefetch_layers=2, layerwise_max_transfer_blocks=1) as (worker, engine, mover):
        mover.valve.clear()
        worker.begin(StepOrders(0, (load("huge", range(24), range(24), window=0),)))
        before = len(mover.log)
        worker.begin(StepOrders(1, (load("small", [30], [30]),)))
        mover.valve.set()
        settle(worker)
        target = engine.arrays[0].ctypes.data + 30 * engine.arrays[0].shape[1]
        place = next(i for i, pieces in enumerate(mover.log) if pieces.target[0] == target)
        assert before == 2
        assert place - before <= 2


def test_a_late_layer_fails_its_own_request_and_the_others_land():
    with worker_of(layer_wait_ms=150, layerwise_prefetch_layers=8) as (worker, _, mover):
        step = worker.begin(StepOrders(0, (load("good", [0, 1], [0, 1]),)))
        assert not forward(step).failed
        mover.valve.clear()
        step = worker.begin(StepOrders(1, (load("late", [2, 3], [2, 3]),)))
        start = time.monotonic()
        report = forward(step)
        assert 0.1 < time.monotonic() - start < 2 * 0.15 + 1
        assert report.failed == ("late",)
        assert report.loads == ()
        mover.valve.set()
        (outcome,) = settle(worker).loads
        assert outcome.end is LoadEnd.LATE
        assert "layer 0" in outcome.reason


def test_a_layer_that_a_device_does_not_let_wait_fails_the_loads_that_it_would_wait_for():
    with worker_of(layerwise_prefetch_layers=8) as (worker, _, mover):
        step = worker.begin(StepOrders(0, (load("good", [0, 1], [0, 1]),)))
        assert not forward(step).failed
        mover.valve.clear()
        step = worker.begin(StepOrders(1, (load("refused", [2, 3], [2, 3]),)))
        with mock.patch.object(worker.gates.gate, "wait", side_effect=DeviceFailed("cuStreamWaitValue32 failed: 1")):
            step.wait(0)
        mover.valve.set()
        assert forward(step).failed == ("refused",)
        (outcome,) = settle(worker).loads
        assert outcome.end is LoadEnd.LOST
        assert "layer 0 can't be waited for: cuStreamWaitValue32" in outcome.reason


def test_a_step_that_ends_quiet_waits_for_the_copies_of_a_load_that_it_read_in_vain():
    """An engine that recomputes into the same blocks must not find an old copy landing in them."""
    with worker_of(layer_wait_ms=20, layerwise_prefetch_layers=1) as (worker, _, mover):
        mover.valve.clear()
        step = worker.begin(StepOrders(0, (load("late", range(4), range(4)),)))
        step.wait(0)
        with pytest.raises(DeadlineExceeded):
            step.end(0.02)
        opener = threading.Timer(0.05, mover.valve.set)
        opener.start()
        report = step.end(5)
        opener.join()
        assert report.failed == ("late",)
        assert [(outcome.request, outcome.end) for outcome in report.loads] == [("late", LoadEnd.LATE)]


def test_a_failed_copy_fails_one_load_of_the_step_and_no_other():
    with worker_of(layerwise_prefetch_layers=1) as (worker, engine, mover):
        engine_before = {layer: array.copy() for layer, array in engine.arrays.items()}
        mover.broken = {2}
        step = worker.begin(StepOrders(0, tuple(load(n, [i], [i]) for i, n in enumerate("abc"))))
        report = forward(step)
        assert report.failed == ("c",)
        ends = {outcome.request: outcome.end for outcome in (*report.loads, *settle(worker).loads)}
        assert ends == {"a": LoadEnd.LANDED, "b": LoadEnd.LANDED, "c": LoadEnd.LOST}
        assert len(mover.log) < 3 * LAYERS
        for layer in range(LAYERS):
            assert np.array_equal(engine.arrays[layer][2], engine_before[layer][2])


def test_an_abort_in_flight_issues_nothing_more_and_reports_when_quiet():
    with worker_of(layerwise_prefetch_layers=1) as (worker, _, mover):
        mover.valve.clear()
        step = worker.begin(StepOrders(0, (load("gone", [0], [0]), load("stays", [1], [1]))))
        worker.abort("gone")
        assert worker.report(0).loads == ()
        mover.valve.set()
        report = forward(step)
        outcomes = {o.request: o for o in (*report.loads, *settle(worker).loads)}
        assert outcomes["gone"].end is LoadEnd.ABORTED
        assert outcomes["gone"].nbytes < outcomes["stays"].nbytes
        assert outcomes["stays"].end is LoadEnd.LANDED
        assert worker.idle


@pytest.mark.parametrize("told", [0, 1])
def test_what_a_step_saves_may_be_told_after_its_loads_have_begun_and_is_saved_once(told):
    saves = tuple(SaveOrder(f"save-{n}", f"cold-{n}", (BlockPairs(0, (n,), (n,)),)) for n in range(2))
    with worker_of() as (worker, _, _):
        step = worker.begin(StepOrders(1, loads=(load("load-1", [4], [4]),), saves=saves if told else ()))
        for _ in range(2):
            step.add(StepOrders(1, loads=(load("load-1", [4], [4]),), saves=saves))
        for layer in range(LAYERS):
            step.wait(layer)
            step.written(layer)
        outcomes = [*step.end().saves]
        worker.quiet(5)
        outcomes += worker.report(2).saves
        assert sorted((save.id, save.saved, save.layers) for save in outcomes) == [
            ("save-0", True, LAYERS),
            ("save-1", True, LAYERS),
        ]
        assert worker.idle


def test_an_aborted_save_is_reported_as_not_saved():
    with worker_of() as (worker, _, mover):
        mover.valve.clear()
        step = worker.begin(StepOrders(0, (), (SaveOrder("s", "gone", (BlockPairs(0, (0, 1), (0, 1)),)),)))
        forward(step)
        worker.abort("gone")
        mover.valve.set()
        (outcome,) = settle(worker).saves
        assert not outcome.saved
        assert worker.idle


def save(name, slots, blocks):
    return SaveOrder(name, name, (BlockPairs(0, tuple(slots), tuple(blocks)),))


def test_the_saves_of_a_step_move_together_and_are_told_one_by_one():
    with worker_of() as (worker, engine, mover):
        step = worker.begin(StepOrders(0, saves=(save("a", [0, 1], [4, 5]), save("b", [2], [6]))))
        for layer in range(LAYERS):
            step.written(layer)
        outcomes = [*step.end().saves, *settle(worker).saves]
        assert len(mover.log) == LAYERS
        block = LAYERS * engine.arrays[0].shape[1]
        assert [(o.id, o.saved, o.nbytes, o.layers, o.swept_layers) for o in outcomes] == [
            ("a", True, 2 * block, LAYERS, 0),
            ("b", True, block, LAYERS, 0),
        ]
        assert [o.pieces for o in outcomes] == [sum(int(pieces.count.sum()) for pieces in mover.log), 0]


@pytest.mark.parametrize(("settings", "windows"), [({}, LAYERS), ({"use_layerwise": False}, 1)])
def test_saves_move_a_window_at_a_time_and_all_at_once_in_bulk(settings, windows):
    with worker_of(**settings) as (worker, _, mover):
        report = forward(worker.begin(StepOrders(0, saves=(save("a", [0, 1], [4, 5]),))))
        (outcome,) = [*report.saves, *settle(worker).saves]
        assert (outcome.saved, outcome.layers, len(mover.log)) == (True, LAYERS, windows)


@pytest.mark.parametrize(("slots", "blocks"), [([9999], [0]), ([0], [BLOCKS]), ([0, 0], [1, 2])])
def test_a_save_of_blocks_that_can_not_be_fails_and_holds_nobody_up(slots, blocks):
    with worker_of(host_bytes=1 << 16) as (worker, _, mover):
        report = forward(worker.begin(StepOrders(0, saves=(save("bad", slots, blocks),))))
        (outcome,) = [*report.saves, *settle(worker).saves]
        assert not outcome.saved
        assert "target" in outcome.reason or "source" in outcome.reason
        assert outcome.nbytes == 0
        assert mover.log == []
        report = forward(worker.begin(StepOrders(1, saves=(save("good", [0], [0]),))))
        (outcome,) = [*report.saves, *settle(worker).saves]
        assert outcome.saved


def test_layers_that_no_hook_announced_are_swept_in_one_go():
    with worker_of() as (worker, _, mover):
        step = worker.begin(StepOrders(0, saves=(save("a", [0], [4]), save("b", [2], [6]))))
        step.written(1)
        outcomes = [*step.end().saves, *settle(worker).saves]
        assert len(mover.log) == 2
        assert {(o.saved, o.layers, o.swept_layers) for o in outcomes} == {(True, LAYERS, LAYERS - 1)}


@pytest.mark.parametrize("announced", [(0,), (1, 2), (0, 2, 3), (0, 1, 2, 3), (4,)])
@pytest.mark.parametrize("window", [2, 3, LAYERS])
def test_a_window_of_which_hooks_announced_only_a_part_is_swept_whole(announced, window):
    with worker_of(layerwise_window=window) as (worker, engine, _):
        for layer, array in engine.arrays.items():
            array[:] = layer + 1
        step = worker.begin(StepOrders(0, saves=(save("a", [0], [4]),)))
        for layer in announced:
            step.written(layer)
        (outcome,) = [*step.end().saves, *settle(worker).saves]
        assert (outcome.saved, outcome.layers, outcome.swept_layers) == (True, LAYERS, LAYERS - len(announced))
        assert [set(worker.ways.slab.read(0, 0, layer)) for layer in range(LAYERS)] == [{n + 1} for n in range(LAYERS)]
        assert worker.idle


def test_an_abort_leaves_the_other_saves_of_its_step_alone():
    with worker_of() as (worker, _, mover):
        mover.valve.clear()
        worker.begin(StepOrders(0, saves=(save("a", [0], [4]), save("b", [2], [6])))).end()
        worker.abort("a")
        mover.valve.set()
        assert {o.request: (o.saved, o.reason) for o in settle(worker).saves} == {
            "a": (False, "the request was aborted"),
            "b": (True, ""),
        }


def test_a_save_repeated_by_draft_layers_counts_each_layer_once():
    with worker_of() as (worker, _, mover):
        step = worker.begin(StepOrders(0, (), (SaveOrder("s", "r", (BlockPairs(0, (0,), (3,)),)),)))
        for _ in range(3):
            for layer in range(LAYERS):
                step.written(layer)
        step.end()
        settle(worker)
        assert len(mover.log) == LAYERS


def test_a_load_of_nothing_completes_at_once():
    with worker_of() as (worker, _, mover):
        step = worker.begin(StepOrders(0, (LoadOrder("e", "empty", 0, (BlockPairs(0, (), ()),)),)))
        report = forward(step)
        assert report.failed == ()
        assert report.loads[0].end is LoadEnd.LANDED
        assert mover.log == []


def test_a_wait_or_a_write_of_a_step_that_moves_nothing_returns_at_once():
    with worker_of() as (worker, _, mover):
        step = worker.begin(StepOrders(0))
        start = time.perf_counter()
        assert forward(step).failed == ()
        assert time.perf_counter() - start < 0.05
        assert mover.log == []


def test_a_load_is_held_against_what_its_slots_had_when_it_was_ordered():
    """Its lease may end before it lands; then its slots may be another's by now, bytes and digests."""
    arrival = HostFlight()
    with worker_of(verify=True, layerwise_prefetch_layers=2 * LAYERS) as (worker, engine, _):
        for layer, block in np.ndindex(LAYERS, 2):
            engine.write(layer, block, [block, *range(3)])
        forward(worker.begin(StepOrders(0, saves=(save("ours", [0], [0]),))))
        settle(worker)
        worker.begin(StepOrders(1, background=(load("late", [0], [2]),)), after=(arrival,)).end()
        forward(worker.begin(StepOrders(2, saves=(save("theirs", [0], [1]),))))
        worker.issuer.wait_until(lambda: all(saving.settled for saving in worker._saves), 5)
        arrival.land()
        (outcome,) = settle(worker).loads
        assert outcome.end is LoadEnd.CORRUPT


@pytest.mark.parametrize("written", [0, 2, LAYERS])
@pytest.mark.parametrize("handed_over", [1, 16])
def test_nothing_that_a_forward_without_an_end_was_to_write_is_said_to_be_saved(written, handed_over, monkeypatch):
    """A sweep would save what has not been computed."""
    monkeypatch.setattr("layercast.flow.layer_step.HANDED_OVER", handed_over)
    with worker_of() as (worker, _, _):
        step = worker.begin(StepOrders(0, saves=(save("half", [0], [0]),)))
        for layer in range(written):
            step.written(layer)
        step.abandon()
        outcomes = [*step.end().saves, *settle(worker).saves]
        assert [outcome.saved for outcome in outcomes] == [False]
        assert worker.idle
