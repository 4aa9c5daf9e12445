"""Loads in two parts: in the background until the rest will hide behind a forward, and the rest inside that forward."""

import random
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest

from layercast.config import Config
from layercast.errors import LayercastError
from layercast.flow.batches import Ways
from layercast.flow.orders import BlockPairs, LoadEnd, LoadOrder, SaveOrder, StepOrders
from layercast.flow.runs import LoadRun
from layercast.flow.worker import Worker
from layercast.move.base import MoverOver, Waits
from layercast.move.cpu import CpuMover
from layercast.move.flights import HostFlight
from layercast.move.gates import CpuGate
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.store.slab import Slab
from layercast.testing.oracle import ByteEngine

LAYERS, BLOCKS, TOKENS = 6, 16, [1, 2, 3, 4]
SPECS = [GroupSpec("full", GroupKind.FULL, 4, tuple(range(LAYERS)))]


class HeldMover(MoverOver):
    """A real mover whose loads each wait until the test lets them go, well or not."""

    def __init__(self):
        super().__init__(CpuMover())
        self.held, self.free = [], True

    def submit(self, pieces, *, after=(), keep=()):
        flight = HostFlight()
        if self.free:
            flight.land()
        else:
            self.held.append(flight)
        return self._mover.submit(pieces, after=(flight, *after), keep=keep)

    def go(self, count=1, broken=False):
        for _ in range(min(count, len(self.held))):
            flight = self.held.pop(0)
            flight.fail(LayercastError("the link broke")) if broken else flight.land()

    def close(self, timeout_s):
        self.free = True
        self.go(len(self.held))
        self._mover.close(timeout_s)


@contextmanager
def worker_of(**settings):
    """A worker whose slots 0 to 7 hold what blocks 0 to 7 held in all layers; the blocks are empty again."""
    config = Config(**{"host_bytes": 1 << 20, "layer_wait_ms": 2000, **settings})
    engine, threads = ByteEngine(SPECS, BLOCKS), threading.active_count()
    slab, mover = Slab.create(engine.layout, config.host_bytes), HeldMover()
    worker = Worker(Ways.between(engine.layout, slab, config), mover, CpuGate())
    try:
        for layer in range(LAYERS):
            for block in range(8):
                engine.write(layer, block, [*TOKENS, block])
        save = SaveOrder("save", "cold", (BlockPairs(0, tuple(range(8)), tuple(range(8))),))
        step = worker.begin(StepOrders(0, saves=(save,)))
        step.end()
        worker.quiet(5)
        worker.report(0)
        for array in engine.arrays.values():
            array[:] = 0
        mover.free = False
        yield worker, engine, mover
    finally:
        mover.close(5)
        slab.close()
    assert threading.active_count() == threads


def load(name="hit", blocks=(0, 1), windows_hidden=2, window=1):
    order = LoadOrder(name, name, 4 * len(blocks), (BlockPairs(0, tuple(blocks), tuple(blocks)),), window)
    layer_bytes = len(blocks) * 4 * 24
    return msgspec.structs.replace(order, hidden_bytes=windows_hidden * layer_bytes)


def landed(worker, order, windows):
    """Wait until so many windows of a load have ended."""
    run = next(run for run in worker._loads if run.order is order)
    worker.issuer.wait_until(lambda: len(run.left()) <= LAYERS - windows or run.end is not None, 5)
    while len(run.left()) > LAYERS - windows and run.end is None:
        time.sleep(0.001)


def start(worker, order):
    worker.begin(StepOrders(1, background=(order,))).end()


def right(engine, layer, blocks=(0, 1)):
    return all(engine.holds(layer, block, [*TOKENS, block]) for block in blocks)


def test_a_load_has_come_once_what_is_left_will_hide():
    with worker_of() as (worker, _, mover):
        order = load()
        start(worker, order)
        for windows in range(1, LAYERS - 2):
            mover.go()
            landed(worker, order, windows)
            assert worker.awaited() == []
        mover.go()
        landed(worker, order, LAYERS - 2)
        assert worker.awaited() == [("hit", LoadEnd.LANDED)]
        assert worker.awaited() == []
        assert worker.report(2).loads == ()


def test_a_load_that_hides_nothing_has_come_once_all_of_it_has():
    with worker_of() as (worker, engine, mover):
        order = load(windows_hidden=0)
        start(worker, order)
        for windows in range(1, LAYERS):
            mover.go()
            landed(worker, order, windows)
            assert worker.awaited() == []
        mover.go()
        worker.quiet(5)
        assert worker.awaited() == [("hit", LoadEnd.LANDED)]
        assert all(right(engine, layer) for layer in range(LAYERS))


def test_one_behind_others_has_come_once_these_leave_time_for_what_is_left_of_it():
    """Else all that are queued would have come at once, and the forward that joins them would wait for them all."""
    with worker_of(layerwise_prefetch_layers=1) as (worker, _, mover):
        orders = [load(str(at), (2 * at, 2 * at + 1), LAYERS) for at in range(3)]
        worker.begin(StepOrders(1, background=tuple(orders))).end()
        assert worker.awaited() == [("0", LoadEnd.LANDED)]
        assert worker.awaited() == []
        for windows in range(1, LAYERS):
            mover.go()
            landed(worker, orders[0], windows)
            assert worker.awaited() == []
        mover.go()
        landed(worker, orders[0], LAYERS)
        assert worker.awaited() == [("1", LoadEnd.LANDED)]
        worker.abort("1")
        assert worker.awaited() == [("2", LoadEnd.LANDED)]


class Device(CpuMover):
    """Takes loads whole, and moves a part when the test says so."""

    whole_steps = True

    def __init__(self):
        super().__init__()
        self.flights, self.waits = [], []

    def submit_all(self, batches, *, after=(), keep=(), waits=Waits.IDLE):
        self.flights += (made := [Parts(len(batch.shifts)) for batch in batches])
        self.waits.append(waits)
        return made


class Parts(HostFlight):
    """A flight whose parts land one by one; it has landed with the last of them."""

    def __init__(self, count):
        super().__init__()
        self.parts = [HostFlight() for _ in range(count)]
        self.asked = 0

    def part(self, nth):
        self.asked += 1
        return self.parts[nth]

    def go(self):
        next(part for part in self.parts if not part.done).land()
        if all(part.done for part in self.parts):
            self.land()


@contextmanager
def worker_over_a_device():
    with worker_of(verify=False) as (worker, *_):
        worker.mover = worker.issuer._mover = device = Device()
        yield worker, device.flights
        for flight in device.flights:
            while not flight.done:
                flight.go()
        device.close(5)


def test_a_device_is_told_who_waits_for_a_load():
    with worker_over_a_device() as (worker, _):
        worker.begin(StepOrders(1, loads=(load("alone", (0,)),))).end()
        worker.begin(StepOrders(2, background=(load("later", (1,)),))).end()
        worker.begin(StepOrders(3, loads=(load("now", (0,)),), background=(load("too", (1,)),))).end()
        assert worker.mover.waits == [Waits.BUSY, Waits.NOBODY, Waits.BUSY, Waits.NOBODY]


@pytest.mark.parametrize("hidden", range(LAYERS + 1))
@pytest.mark.parametrize("window", [1, LAYERS])
def test_of_a_load_that_a_device_has_whole_it_is_seen_how_far_it_has_come(hidden, window):
    with worker_over_a_device() as (worker, flights):
        start(worker, load(windows_hidden=hidden, window=window))
        (run,), (flight,) = worker._loads, flights
        for moved in range(0, LAYERS, window):
            assert run.left_bytes == (LAYERS - moved) * 2 * 4 * 24
            assert bool(worker.awaited()) == (LAYERS - moved <= hidden < LAYERS - moved + window)
            flight.go()
        assert worker.awaited() == [("hit", LoadEnd.LANDED)] * (hidden < window)
        assert run.landed


def test_loads_that_a_forward_waits_for_come_before_those_in_the_background():
    """So what is left of them is what the background waits for, too."""
    with worker_over_a_device() as (worker, flights):
        start(worker, load("later", windows_hidden=LAYERS + 2))
        worker.begin(StepOrders(2, loads=(load("quick", (2, 3)),)))
        for left in reversed(range(LAYERS)):
            assert worker.awaited() == []
            flights[1].go()
            if left == 2:
                break
        assert worker.awaited() == [("later", LoadEnd.LANDED)]


def test_what_a_device_has_of_a_load_that_is_over_still_comes_before_those_behind_it():
    with worker_over_a_device() as (worker, flights):
        start(worker, load("over", windows_hidden=0))
        start(worker, load("next", (2, 3), windows_hidden=LAYERS))
        worker.abort("over")
        assert worker.awaited() == [("over", LoadEnd.ABORTED)]
        for _ in range(LAYERS):
            assert worker.awaited() == []
            flights[0].go()
        assert worker.awaited() == [("next", LoadEnd.LANDED)]


@pytest.mark.parametrize("aborted", [False, True])
def test_no_load_waits_for_one_behind_it_that_nobody_waits_for_any_more(aborted):
    with worker_over_a_device() as (worker, flights):
        start(worker, load("first", windows_hidden=1))
        start(worker, load("behind", (2, 3), windows_hidden=2 * LAYERS))
        assert worker.awaited() == [("behind", LoadEnd.LANDED)]
        if aborted:
            worker.abort("behind")
        for _ in range(LAYERS - 1):
            assert worker.awaited() == []
            flights[0].go()
        assert worker.awaited() == [("first", LoadEnd.LANDED)]


def test_how_far_loads_have_come_is_looked_up_only_as_far_as_it_matters():
    """A forward's thread asks before each step: of many that are queued it would take milliseconds."""
    with worker_over_a_device() as (worker, flights):
        worker.begin(StepOrders(1, loads=(load("now", (6, 7), windows_hidden=0),))).end()
        for queued in range(3):
            flights[0].asked = 0  # the gates have
            assert worker.awaited() == []
            assert [flight.asked > 0 for flight in flights] == [queued > 0] + [False] * queued
            start(worker, load(str(queued), (queued,), windows_hidden=1))


def said(worker, mover, order, windows=LAYERS - 2):
    start(worker, order)
    for number in range(windows):
        mover.go()
        landed(worker, order, number + 1)
    assert worker.awaited() == [("hit", LoadEnd.LANDED)]


def test_the_forward_that_joins_it_waits_for_the_rest_layer_by_layer():
    with worker_of(layerwise_prefetch_layers=1) as (worker, engine, mover):
        order = load()
        said(worker, mover, order)
        step = worker.begin(StepOrders(2, joins=("hit",)))
        assert [order.id for order in step.reads] == ["hit"]
        for layer in range(LAYERS):
            if layer >= LAYERS - 2:
                threading.Timer(0.02, mover.go).start()
            step.wait(layer)
            assert right(engine, layer)
        report = step.end()
        assert report.failed == ()
        ((outcome),) = report.loads
        assert (outcome.end, outcome.layers, outcome.verified) == (LoadEnd.LANDED, LAYERS, True)
        assert outcome.exposed_s > 0
        assert worker.idle


@pytest.mark.parametrize("way", ["inside a forward", "joined", "in the background"])
def test_where_a_device_waits_by_itself_it_is_not_known_how_long(way, monkeypatch):
    monkeypatch.setattr(HeldMover, "whole_steps", True)
    order, outcomes = load(windows_hidden=LAYERS), []
    with worker_of() as (worker, _, mover):
        if way != "inside a forward":
            start(worker, order)
            assert worker.awaited() == [("hit", LoadEnd.LANDED)]
        loads, joins = (order,) if way == "inside a forward" else (), ("hit",) if way == "joined" else ()
        step = worker.begin(StepOrders(2, loads=loads, joins=joins))
        mover.go(LAYERS)
        for layer in range(LAYERS):
            step.wait(layer)
        outcomes += step.end().loads
        worker.quiet(5)
        outcomes += worker.report(3).loads
        outcomes += [] if joins or loads else worker.begin(StepOrders(4, joins=("hit",))).end().loads
    assert [outcome.end for outcome in outcomes] == [LoadEnd.LANDED]
    assert outcomes[0].exposed_s == (0.0 if way == "in the background" else None)


def test_a_forward_that_does_not_join_it_waits_for_nothing():
    with worker_of() as (worker, _, mover):
        said(worker, mover, load())
        step = worker.begin(StepOrders(2))
        for layer in range(LAYERS):
            step.wait(layer)
        assert step.end().loads == ()
        assert not worker.idle


def test_what_is_left_goes_before_other_background_loads_once_a_forward_waits_for_it():
    with worker_of(layerwise_prefetch_layers=1) as (worker, engine, mover):
        said(worker, mover, load(windows_hidden=3), LAYERS - 3)
        start(worker, load("other", blocks=(4, 5), windows_hidden=0))
        step = worker.begin(StepOrders(2, joins=("hit",)))
        for layer in range(LAYERS):
            if layer >= LAYERS - 3:
                mover.go()
            step.wait(layer)
            assert right(engine, layer)
        assert not step.end().failed
        assert not right(engine, 1, (4, 5))


def test_all_that_a_forward_waits_for_is_handed_to_a_device_in_the_order_of_its_layers(monkeypatch):
    monkeypatch.setattr(HeldMover, "whole_steps", True)
    with worker_of(layerwise_prefetch_layers=1) as (worker, *_):
        start(worker, load(windows_hidden=LAYERS))
        assert worker.awaited() == [("hit", LoadEnd.LANDED)]
        submit, handed = worker.issuer._submit, []
        monkeypatch.setattr(worker.issuer, "_submit", lambda batches, *rest: (handed.append(batches), submit(batches)))
        worker.begin(StepOrders(2, loads=(load("new", (2, 3)), load("newer", (4, 5))), joins=("hit",)))
        (batches,) = handed  # the device has all of "hit" already
        parts = [(turn, batch.owner) for batch in batches for turn in batch.pieces.turns]
        expected = [(layer, name) for layer in range(LAYERS) for name in ("new", "newer")]
        assert sorted(parts, key=lambda part: part[0]) == expected, "a device moves them by their turns"


class Turn(LoadRun):
    """One whose last copies break while it is being looked at, as another thread may have its turn at any time."""

    @property
    def settled(self):
        if not super().settled:
            self.mover.go(LAYERS, broken=True)
            self.overseer.issuer.wait_idle(5)
        return super().settled


@pytest.mark.parametrize("moment", ["as it is said", "as the next ones are said", "as it is joined"])
def test_one_that_fails_in_whatever_moment_fails_the_forward_that_joins_it(moment, monkeypatch):
    with worker_of(layerwise_prefetch_layers=LAYERS) as (worker, _, mover):
        start(worker, load(windows_hidden=LAYERS))
        monkeypatch.setattr(Turn, "mover", mover, raising=False)
        (run,) = worker._loads
        if moment == "as it is said":
            run.__class__ = Turn
        said_to_have_come = worker.awaited()
        run.__class__ = Turn
        if moment == "as the next ones are said":
            assert worker.awaited() == []
        if said_to_have_come == [("hit", LoadEnd.LANDED)]:
            assert worker.begin(StepOrders(2, joins=("hit",))).end().failed == ("hit",)
        else:
            assert said_to_have_come == [("hit", LoadEnd.LOST)]
        assert worker.idle or [load.end for load in worker.report(3).loads] == [LoadEnd.LOST]
        assert worker.idle


def test_one_that_fails_in_the_moment_in_which_nothing_is_left_of_it_is_not_said_to_have_come(monkeypatch):
    """No forward is to join it then: an engine of several groups has no way to be told of one that fails in there."""
    with worker_of(layerwise_prefetch_layers=LAYERS) as (worker, _, mover):
        start(worker, load(windows_hidden=0))
        monkeypatch.setattr(Turn, "mover", mover, raising=False)
        (run,) = worker._loads
        run.__class__ = Turn
        assert worker.awaited() == [("hit", LoadEnd.LOST)]
        assert [load.end for load in worker.report(2).loads] == [LoadEnd.LOST]
        assert worker.begin(StepOrders(3, joins=("hit",))).end().failed == ()
        assert worker.idle


def test_one_that_fails_after_it_was_said_to_have_come_fails_the_forward_that_joins_it_and_is_not_told_before():
    with worker_of() as (worker, _, mover):
        order = load()
        said(worker, mover, order)
        mover.go(broken=True)
        mover.go()
        worker.quiet(5)
        assert worker.report(2).loads == ()
        assert worker.awaited() == []
        step = worker.begin(StepOrders(3, joins=("hit",)))
        for layer in range(LAYERS):
            step.wait(layer)
        assert step.judge() == ("hit",)
        report = step.end()
        assert report.failed == ("hit",)
        assert [outcome.end for outcome in report.loads] == [LoadEnd.LOST]
        assert worker.idle


def test_one_that_never_lands_fails_the_forward_after_its_deadline():
    with worker_of(layer_wait_ms=60) as (worker, _, mover):
        said(worker, mover, load())
        step = worker.begin(StepOrders(2, joins=("hit",)))
        for layer in range(LAYERS):
            step.wait(layer)
        assert step.end().failed == ("hit",)
        mover.go(LAYERS)
        worker.quiet(5)
        assert [outcome.end for outcome in worker.report(3).loads] == [LoadEnd.LATE]
        assert worker.idle


@pytest.mark.parametrize("broken", [False, True])
def test_an_abort_ends_one_that_no_forward_has_joined(broken):
    with worker_of() as (worker, _, mover):
        said(worker, mover, load())
        mover.go(broken=broken)
        worker.issuer.wait_until(lambda: worker._said[0].end is not None or not broken, 5)
        worker.begin(StepOrders(2, aborts=("hit",))).end()
        mover.go(LAYERS)
        worker.quiet(5)
        assert worker.awaited() == []
        (outcome,) = worker.report(3).loads
        assert outcome.end is (LoadEnd.LOST if broken else LoadEnd.ABORTED)
        assert worker.idle


@pytest.mark.parametrize("seed", range(40))
def test_a_layer_that_a_forward_reads_is_right_or_the_forward_fails(seed):
    """Loads of random sizes, windows and hidden parts that land, break, are joined or aborted at random moments."""
    draw = random.Random(seed)
    with worker_of(layer_wait_ms=400, layerwise_prefetch_layers=draw.randrange(1, 4)) as (worker, engine, mover):
        orders = {
            name: load(name, blocks, draw.randrange(LAYERS + 1), draw.choice([1, 2, 0]))
            for name, blocks in (("a", (0, 1, 2)), ("b", (3,)), ("c", (4, 5, 6, 7)))
        }
        waiting, ready, step_number = dict(orders), set(), 1
        worker.begin(StepOrders(step_number, background=tuple(orders.values()))).end()
        over = threading.Event()
        helper = threading.Thread(target=feed, args=(mover, draw.randrange(1 << 30), over))
        helper.start()
        deadline = time.monotonic() + 10
        while not worker.idle and time.monotonic() < deadline:
            step_number += 1
            ready.update(name for name, end in worker.awaited() if end is LoadEnd.LANDED)
            aborts = tuple(name for name in list(waiting) if draw.random() < 0.02)
            joins = tuple(sorted(ready.difference(aborts))) if draw.random() < 0.7 else ()
            for name in aborts:
                waiting.pop(name)
                ready.discard(name)
            step = worker.begin(StepOrders(step_number, joins=joins, aborts=aborts))
            seen = {}
            for layer in range(LAYERS):
                step.wait(layer)
                for name in joins:
                    seen[name] = seen.get(name, True) and right(engine, layer, orders[name].pairs[0].blocks)
            failed = step.judge()
            for name in joins:
                assert seen[name] or name in failed, (name, seen, failed)
            ready.difference_update(joins)
            step.end()
        over.set()
        helper.join()
        assert worker.idle
        worker.quiet(5)


def feed(mover, seed, over):
    """Let copies go, one in fifteen of them broken, until it is over."""
    draw = random.Random(seed)
    while not over.wait(draw.random() * 0.002):
        mover.go(draw.randrange(1, 4), broken=draw.random() < 0.07)
