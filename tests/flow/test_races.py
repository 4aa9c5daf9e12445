"""What the forward's thread and the mover's thread can do to one another, forced into the orders that hurt."""

import threading
from contextlib import contextmanager

import pytest

from layercast.config import Config
from layercast.errors import DeadlineExceeded, LayercastError, Refused
from layercast.flow import runs
from layercast.flow.batches import Ways
from layercast.flow.gatekeeper import Gatekeeper
from layercast.flow.issue import Batch, Issuer, Sent
from layercast.flow.orders import BlockPairs, LoadEnd, LoadOrder, StepOrders
from layercast.flow.runs import LoadRun
from layercast.flow.worker import Worker
from layercast.move.base import MoverOver
from layercast.move.cpu import CpuMover
from layercast.move.flights import HostDigestFlight, HostFlight, landed
from layercast.move.gates import CpuGate
from layercast.move.raw import digests_of
from layercast.observe.timeline import SpanKind
from layercast.plan.pieces import Pieces
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.store.slab import Slab
from layercast.testing.oracle import ByteEngine

LAYERS, BLOCKS = 3, 8
NOTHING = Pieces.join([])


class Wrapped(MoverOver):
    """A real mover, for tests that change a method."""

    def __init__(self):
        super().__init__(CpuMover())

    def submit(self, pieces, *, after=(), keep=()):
        return self._mover.submit(pieces, after=after, keep=keep)

    def close(self, timeout_s):
        self._mover.close(timeout_s)


@contextmanager
def worker_over(make, **settings):
    specs = [GroupSpec("full", GroupKind.FULL, 4, tuple(range(LAYERS)))]
    config = Config(**{"host_bytes": 1 << 16, "kv_recompute_threshold": 0, "layer_wait_ms": 5000, **settings})
    threads, engine, mover = threading.active_count(), ByteEngine(specs, BLOCKS), make()
    slab = Slab.create(engine.layout, config.host_bytes)
    try:
        yield Worker(Ways.between(engine.layout, slab, config), mover, CpuGate())
    finally:
        mover.close(5)
        slab.close()
    assert threading.active_count() == threads


def load(name, slot, block):
    return LoadOrder(name, name, 4, (BlockPairs(0, (slot,), (block,)),))


def forward(step):
    for layer in range(LAYERS):
        step.wait(layer)
        step.written(layer)
    return step.end()


def settled(worker):
    worker.quiet(5)
    return worker.report(99)


class EndsBetween(HostDigestFlight):
    """Ends on a thread of its own once the first call is attached, and holds its owner until that call has begun."""

    def __init__(self, ranges, begun):
        super().__init__()
        self.thread = threading.Thread(target=lambda: self.land_with(digests_of(ranges)))
        self._begun, self._first = begun, True

    def then(self, call):
        super().then(call)
        if self._first:
            self._first = False
            self.thread.start()
            assert self._begun.wait(5)


def test_a_step_does_not_end_before_what_it_read_has_been_checked(monkeypatch):
    """The gate may open while the digests are still being compared: the verdict is awaited, not guessed."""
    begun, go, flights, differing = threading.Event(), threading.Event(), [], runs._differing

    def slow(*args):
        begun.set()
        assert go.wait(5)
        return differing(*args)

    class Ends(Wrapped):
        def digest(self, ranges, *, after=()):
            after[0].wait(5)
            flights.append(EndsBetween(ranges, begun))
            return flights[-1]

    monkeypatch.setattr(runs, "_differing", slow)
    with worker_over(Ends) as worker:
        # Nothing was ever saved to slot 0, so no digest of it is right.
        step = worker.begin(StepOrders(0, (load("bad", 0, 0),)))
        timer = threading.Timer(0.1, go.set)
        timer.start()
        report = forward(step)
        assert report.failed == ("bad",)
        timer.join()
        for flight in flights:
            flight.thread.join()
        outcomes = [*report.loads, *settled(worker).loads]
        assert [outcome.end for outcome in outcomes] == [LoadEnd.CORRUPT]


def run_of(name, *layers):
    """A load with one empty batch for each of `layers`."""

    class Nobody:
        def opened(self, sent): ...

        def stopped(self, run): ...

    run = LoadRun(load(name, 0, 0), name, Nobody())
    batches = [Batch(run, name, (layer,), NOTHING) for layer in layers]
    run.plan(batches)
    return run, batches


def test_a_batch_that_ended_before_a_rearming_is_not_counted_after_it():
    keeper = Gatekeeper(CpuGate())
    late, _ = run_of("late", 0)
    run, (first, second) = run_of("run", 1, 1)
    keeper.arm([late, run])
    run.ended([Sent(first, landed())])
    with pytest.raises(DeadlineExceeded):
        keeper.gate.wait(0, 0.01)
    assert keeper.give_up(0) == [late]
    keeper.opened([Sent(first, landed())])
    with pytest.raises(DeadlineExceeded):
        keeper.gate.wait(1, 0.01)
    assert keeper.give_up(1) == [run]
    assert set(run.left()) == {second}


def test_gates_that_are_armed_while_a_load_fails_do_not_wait_for_what_is_not_submitted_any_more():
    valve = HostFlight()

    class Held(Wrapped):
        def submit(self, pieces, *, after=(), keep=()):
            return super().submit(pieces, after=(*after, valve), keep=keep)

    with worker_over(Held, layerwise_prefetch_layers=1, layer_wait_ms=20) as worker:
        step = worker.begin(StepOrders(0, (load("a", 0, 0),)))
        (run,), skip = worker._loads, worker.gates.skip
        worker.gates.release()  # as while its batches are submitted

        def skip_and_arm(batches):
            skip(batches)
            worker.gates.arm([run])

        worker.gates.skip = skip_and_arm
        run.fail(LoadEnd.LOST, "a reason")
        assert [worker.gates.gate.wait(layer, 0.01) for layer in range(1, LAYERS)] == [0] * (LAYERS - 1)
        valve.land()
        assert forward(step).failed == ("a",)
        settled(worker)
        assert worker.idle


def test_a_load_whose_digest_is_refused_is_under_way_until_its_copy_has_ended():
    valve = HostFlight()

    class NoDigests(Wrapped):
        def submit(self, pieces, *, after=(), keep=()):
            return super().submit(pieces, after=(*after, valve), keep=keep)

        def digest(self, ranges, *, after=()):
            raise Refused("no more digests")

    with worker_over(NoDigests, layer_wait_ms=20) as worker:
        report = forward(worker.begin(StepOrders(0, (load("a", 0, 0),))))
        assert report.failed == ("a",)
        assert report.loads == worker.report(1).loads == ()
        valve.land()
        (outcome,) = settled(worker).loads
        assert outcome.end in (LoadEnd.LOST, LoadEnd.LATE)


@pytest.mark.parametrize("error", [RuntimeError("the driver is unhappy"), LayercastError("refused")])
def test_a_mover_that_raises_fails_one_load_and_no_other(error):
    class Raising(Wrapped):
        calls = 0

        def submit(self, pieces, *, after=(), keep=()):
            self.calls += 1
            if self.calls == 1:
                raise error
            return super().submit(pieces, after=after, keep=keep)

    with worker_over(Raising, verify=False) as worker:
        report = forward(worker.begin(StepOrders(0, (load("a", 0, 0), load("b", 1, 1)))))
        assert report.failed == ("a",)
        ends = {o.request: (o.end, o.reason) for o in (*report.loads, *settled(worker).loads)}
        assert ends["a"] == (LoadEnd.LOST, str(error))
        assert ends["b"][0] is LoadEnd.LANDED
        assert worker.idle


class Careless:
    """A run that raises when it is told of an end."""

    kind = SpanKind.PUSH

    def submitted(self, sent, since_s): ...

    def ended(self, over):
        raise ArithmeticError("a mistake in a callback")


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_a_run_that_raises_takes_no_place_in_the_queue_with_it(ends_at_once):
    mover, valve = Wrapped(), HostFlight()
    issuer = Issuer(mover, depth=1)
    if ends_at_once:
        mover.submit = lambda pieces, after=(), keep=(): landed()
    after = () if ends_at_once else (valve,)
    try:
        for _ in range(3):
            try:
                issuer.add_saves([Batch(Careless(), "x", (0,), NOTHING, None, after)])
            except ArithmeticError:
                assert ends_at_once
        if not ends_at_once:
            valve.land()
        issuer.wait_idle(2)
    finally:
        mover.close(5)
