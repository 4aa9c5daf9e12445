"""The worker side of one rank: turns a step's orders into copies, gates and reports.

Works by slot and block number. Does not know keys, leases, or why something moves.
"""

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from layercast.errors import DeadlineExceeded, Missing, Refused
from layercast.flow.batches import Ways
from layercast.flow.gatekeeper import Gatekeeper
from layercast.flow.issue import Batch, Issuer, Sent
from layercast.flow.orders import (
    LoadEnd,
    LoadOrder,
    PushOrder,
    ReceiveOrder,
    SaveOrder,
    StepOrders,
    StepReport,
    TierOrder,
)
from layercast.flow.runs import Arrived, LoadRun, ReceiveRun, SaveRun
from layercast.flow.tier import Tier
from layercast.move.base import Flight, Gate, Mover
from layercast.move.flights import delayed
from layercast.observe.timeline import OFF, SpanKind, Timeline
from layercast.plan.batches import windows_of
from layercast.plan.pieces import Pieces

HANDED_OVER = 16
"""Saved windows handed over at a time: to wake the thread that copies costs the forward more than all the rest."""
Ready = tuple[Sequence[int], Flight]
"""Layers that are written, and what their copies wait for."""


class Outbound(Protocol):
    """Where pushes go."""

    def written(self, order: PushOrder, layer: int) -> None:
        """The order's blocks are complete in this layer. A repeat changes nothing. Never blocks."""
        ...


class Inbound(Protocol):
    """Where pushes land."""

    def arrivals(self, order: ReceiveOrder) -> Mapping[int, Flight]:
        """For each layer, a flight that lands when the whole push has arrived in that layer."""
        ...

    def arrived(self, order: ReceiveOrder) -> Arrived:
        """What has come of a push; it may be read after the push has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Peers:
    """The network's two ends, where a worker has them."""

    outbound: Outbound | None = None
    inbound: Inbound | None = None


NO_PEERS = Peers()


class Worker:
    """One rank's pipelines. Its methods belong to the engine's thread; batches end on the mover's."""

    def __init__(
        self,
        ways: Ways,
        mover: Mover,
        gate: Gate,
        peers: Peers = NO_PEERS,
        keep: Sequence[object] = (),
        timeline: Timeline = OFF,
        tier: Tier | None = None,
    ) -> None:
        self.ways = ways
        self.tier = tier
        self.mover = mover
        self.gates = Gatekeeper(gate)
        self.issuer = Issuer(mover, ways.config.layerwise_prefetch_layers, (*keep, ways.slab), timeline)
        self.timeline = timeline
        self.peers = peers
        windows = windows_of(ways.layers, ways.save_window)
        self.window_of = {layer: window for window in windows for layer in window}
        self._loads: list[LoadRun] = []
        self._background: list[LoadRun] = []
        """Those of `_loads` that no forward reads and whose request still waits for them."""
        self._said: list[LoadRun] = []
        """Those of `_loads` that were said to have come while a part was still to land; a forward is to wait for it."""
        self._saves: list[SaveRun] = []

    def begin(self, orders: StepOrders, after: Sequence[Flight] = ()) -> "LayerStep":
        """Start a step: plan and issue its loads, take note of its saves and pushes.

        after: what loads must not overtake (on a device, work of the engine on the blocks that they fill).
        Raises BadBlocks for ids of loads that can't be, before anything of the step moves; saves of such ids fail.
        """
        for request in orders.aborts:
            self.abort(request)
        if self.ways.stagger_s and (orders.loads or orders.background):
            after = (*after, delayed(self.ways.stagger_s))
        loads = dict(self._load(order, after) for order in orders.loads)
        background = dict(self._load(order, after) for order in orders.background)
        arrivals = dict(map(self._receive, orders.receives))
        joined = self._join(orders.joins)
        self._loads += [*loads, *arrivals, *background]
        self._background += background
        if loads:
            self.issuer.add_loads([*itertools.chain(*loads.values())])
        for run in joined:
            self.issuer.hasten(run.id)
        for run, flights in arrivals.items():
            _follow(run, flights)
        if background:
            self.issuer.add_loads([*itertools.chain(*background.values())], background=True)
        if self.mover.whole_steps:  # a stream waits for these, and says nothing of it
            for run in (*loads, *joined):
                run.clocking.exposed_s = None
        awaited = [*loads, *arrivals, *joined]
        if awaited:  # only now, as their flights are known, and what has landed needs no gate
            self.gates.arm(awaited)
        return LayerStep(self, orders, awaited)

    def start(self, orders: Sequence[TierOrder]) -> None:
        """Start copies to and from the store below the slab. Raises Refused where there is none."""
        for order in orders:
            if self.tier is None:
                raise Refused("an order for the store below a slab that has none; give both sides the same settings")
            self.tier.begin(order)

    def abort(self, request: str) -> None:
        """Issue nothing more of a request; what is in flight is reported once it has ended."""
        for run in [run for run in self._loads if run.order.request == request]:
            run.fail(LoadEnd.ABORTED, "the request was aborted")
        self._said = [run for run in self._said if run.order.request != request]
        for saving in self._saves:
            saving.abort(request)

    def report(self, step: int, failed: Sequence[str] = ()) -> StepReport:
        """What has ended since the last report."""
        landed = [run for run in self._loads if run.settled and (run.end is None or run not in self._said)]
        saved = [save for save in self._saves if save.settled]
        self._loads = [run for run in self._loads if run not in landed]
        self._saves = [save for save in self._saves if save not in saved]
        verify = self.ways.verify
        return StepReport(
            step,
            tuple(failed),
            tuple(run.outcome(verify) for run in landed),
            tuple(outcome for saving in saved for outcome in saving.outcomes()),
            () if self.tier is None else self.tier.ended(),
            self.mover.halted,
            self.mover.staging_bytes,
        )

    def awaited(self) -> list[tuple[str, LoadEnd]]:
        """(request, end) of the background loads that are over since the last call, for better or worse.

        One whose rest will hide behind the next forward counts as landed: the forwards that name it in their `joins`
        wait for the rest. A failed one may still be landing: its blocks are quiet only once its outcome has been
        reported.
        """
        now = time.monotonic()
        for run in self._background:
            first_s = run.clocking.first_s
            if first_s is not None and now - first_s > self.ways.config.lease_s:
                run.fail(LoadEnd.LATE, f"had not landed after {self.ways.config.lease_s:g} s")
        over = [run for run in self._background if run.end is not None or run.hidden]
        self._background = [run for run in self._background if run not in over]
        self._said = [run for run in self._said if run.end is not None or not run.settled]
        self._said += [run for run in over if run.end is None and not run.settled]
        return [(run.order.request, run.end or LoadEnd.LANDED) for run in over]

    def quiet(self, timeout_s: float) -> None:
        """Block until nothing is queued or in flight. Raises DeadlineExceeded after `timeout_s` seconds."""
        self.issuer.wait_idle(timeout_s)
        if self.tier is not None:
            self.tier.wait(timeout_s)

    def quiet_failed(self, timeout_s: float, loads: Sequence[LoadRun] | None = None) -> None:
        """Block until no copy of a load that has failed (of these, or of any) is in flight. Raises DeadlineExceeded."""
        failed = [run for run in (self._loads if loads is None else loads) if run.end is not None]
        if failed:
            self.issuer.wait_until(lambda: all(run.settled for run in failed), timeout_s)

    @property
    def idle(self) -> bool:
        """Whether everything that was begun has been reported."""
        return not (self._loads or self._saves or self._background) and (self.tier is None or self.tier.idle)

    def opened(self, sent: Sequence[Sent]) -> None:
        """Batches of a load are under way."""
        self.gates.opened(sent)

    def stopped(self, run: LoadRun) -> None:
        """A load has failed: move no more of it, and let nobody wait for the rest."""
        dropped = self.issuer.drop(run.id)
        run.give_back(dropped)  # first, or gates that are armed meanwhile would wait for what nobody will skip
        self.gates.skip(dropped)

    def _load(self, order: LoadOrder, after: Sequence[Flight]) -> tuple[LoadRun, list[Batch]]:
        run = LoadRun(order, order.id, self)
        batches = self.ways.load_batches(run, order, tuple(after))
        run.plan(batches)
        return run, batches

    def save(self, orders: Sequence[SaveOrder]) -> SaveRun:
        """Follow a step's saves."""
        self._saves.append(self.ways.saving_of(orders))
        return self._saves[-1]

    def _join(self, requests: Collection[str]) -> list[LoadRun]:
        """Loads that were said to have come, and that the next forward has to wait for or has to fail with."""
        named = [run for run in self._said if run.order.request in requests]
        self._said = [run for run in self._said if run not in named]
        return [run for run in named if run.end is not None or not run.settled]

    def _receive(self, order: ReceiveOrder) -> tuple[LoadRun, dict[Batch, Flight]]:
        """A push is followed, not moved: one empty batch a layer, whose flight ends when the peer's bytes are in."""
        if self.peers.inbound is None:
            raise Missing(f"{order.request}: this worker receives no pushes")
        run = ReceiveRun(order, order.transfer, self, arrived=self.peers.inbound.arrived(order))
        flights = {
            Batch(run, run.id, (layer,), Pieces.join([])): flight
            for layer, flight in self.peers.inbound.arrivals(order).items()
        }
        run.plan(list(flights))
        return run, flights


def _follow(run: LoadRun, flights: Mapping[Batch, Flight]) -> None:
    for batch, flight in flights.items():
        sent = (Sent(batch, flight),)
        flight.then(lambda _, sent=sent: run.ended(sent))  # type: ignore[misc]
        run.submitted(sent, time.monotonic())


class LayerStep:
    """One forward of a worker (see `flow.step.Step`)."""

    def __init__(self, worker: Worker, orders: StepOrders, loads: list[LoadRun]) -> None:
        self._worker = worker
        self._orders = StepOrders(orders.step)
        self._timeline = worker.timeline
        self._loads = loads
        self._saving: SaveRun | None = None
        self._due: dict[int, Sequence[int]] = {}
        """Layers to be saved that have not been announced, and their windows."""
        self._kept: list[tuple[PushOrder, int]] = []
        self._ready: list[Ready] = []
        """What is to be handed over; all that a mover of whole steps gets is, at the end."""
        self._waited: set[int] = set()
        self._computing: tuple[int, float] | None = None
        self._timeout_s = worker.ways.config.layer_wait_ms / 1000
        self.add(orders)

    def add(self, orders: StepOrders) -> None:
        """What was not known yet when the loads began: saves and copies below the slab. Raises Refused without one."""
        told, self._orders = self._orders, orders
        self._worker.start(orders.tier[len(told.tier) :])
        if orders.saves and not told.saves:
            self._saving = self._worker.save(orders.saves)
            self._due = {layer: self._worker.window_of[layer] for layer in self._saving.layers}

    @property
    def number(self) -> int:
        """The step's, as its orders have it."""
        return self._orders.step

    def wait(self, layer: int) -> None:
        """Before the layer reads cached KV. Never raises; what is late by `layer_wait_ms` fails its request alone."""
        timeline = self._timeline
        if not self._loads and not timeline.on:
            return
        self._waited.add(layer)
        if timeline.on:
            self._computed()
        try:
            blocked = self._worker.gates.gate.wait(layer, self._timeout_s)
        except DeadlineExceeded:
            blocked = self._timeout_s
            for run in self._worker.gates.give_up(layer):
                run.fail(LoadEnd.LATE, f"layer {layer} had not arrived after {self._timeout_s:g} s")
        if blocked:
            for run in self._loads:
                if layer in run.layers:
                    run.clocking.waited(blocked)
        if timeline.on:
            now = time.monotonic()
            if blocked:
                timeline.record(SpanKind.WAIT, layer, now - blocked, now)
            self._computing = (layer, now)

    def written(self, layer: int) -> None:
        """After this step's KV of the layer lies in its blocks. Repeats change nothing. Never blocks."""
        window = self._due.pop(layer, None)
        if window is not None and self._due.keys().isdisjoint(window):
            self._ready.append((window, self._worker.mover.mark()))
            if len(self._ready) >= HANDED_OVER and not self._worker.mover.whole_steps:
                self._hand_over()
        for push in self._orders.pushes:
            if self._unjudged(push, layer):
                self._kept.append((push, layer))
            else:
                self._push(push, layer)

    def _unjudged(self, push: PushOrder, layer: int) -> bool:
        """Whether the peer could take the push for whole with this layer, though a load behind it may yet be wrong."""
        final = push.last and layer == self._worker.ways.layers[-1]
        return final and any(run.order.request == push.request for run in self._loads)

    def _push(self, push: PushOrder, layer: int) -> None:
        if self._worker.peers.outbound is not None:
            self._worker.peers.outbound.written(push, layer)

    def _computed(self) -> None:
        """Record the layer that has computed since its wait ended."""
        if self._computing is not None:
            layer, start_s = self._computing
            self._timeline.record(SpanKind.COMPUTE, layer, start_s, time.monotonic())
            self._computing = None

    def _sweep(self, saving: SaveRun) -> None:
        """Have what no hook has announced, and the windows that it belongs to, saved in one go."""
        window_of, due = self._worker.window_of, self._due.keys()
        saving.swept |= due
        missing = sorted(layer for layer in saving.layers if not due.isdisjoint(window_of[layer]))
        self._ready.append((missing, self._worker.mover.mark()))
        self._due = {}

    def _hand_over(self) -> None:
        """Have what is ready to be saved issued: the forward's thread, cold from its layers, would be slow at it."""
        saving, ready, self._ready = self._saving, self._ready, []
        if saving is not None and ready:
            self._worker.issuer.aside(lambda: self._issue(saving, ready), saving.give_up)

    def _issue(self, saving: SaveRun, ready: Sequence[Ready]) -> None:
        """Issue saves in the order in which they were written."""
        batches = self._worker.ways.save_batches(saving, ready)
        if saving.queue(batches):
            self._worker.issuer.add_saves(sorted(batches, key=lambda batch: batch.layers[0]))

    def abandon(self) -> None:
        """The forward has not come to its end: what has not been handed over by now is not saved, so nothing is."""
        if self._saving is not None:
            self._saving.give_up(Missing("its forward has not come to its end"))
        self._due, self._ready = {}, []

    def quiet_failed(self, timeout_s: float) -> None:
        """Block until no copy into a block that this forward has read in vain is in flight. Raises DeadlineExceeded."""
        self._worker.quiet_failed(timeout_s, self._loads)

    @property
    def reads(self) -> tuple[LoadOrder | ReceiveOrder, ...]:
        """Orders whose KV this forward waits for."""
        return tuple(run.order for run in self._loads)

    def judge(self, layers: Collection[int] | None = None) -> tuple[str, ...]:
        """Requests whose loads have failed, once these layers (None: all) have run.

        A load whose layers were not all waited for may have been read before it landed, so it has failed. A gate opens
        when bytes are in place; whether they are right is known a little later, and here that is waited for.
        """
        for run in self._loads:
            due = run.layers if layers is None else run.layers.intersection(layers)
            unread = sorted(due - self._waited)
            if unread:
                run.fail(LoadEnd.LATE, f"the forward never waited for layers {unread}: their hooks did not fire")
            elif not run.decided(due, self._timeout_s):
                run.fail(LoadEnd.LATE, f"its last bytes had not been checked after {self._timeout_s:g} s")
        return tuple(sorted({run.order.request for run in self._loads if run.end is not None}))

    def end(self, quiet_s: float = 0.0) -> StepReport:
        """Sweep the layers that no hook announced, open every gate, and report what ended.

        quiet_s: how long to wait for what is in flight into blocks that this forward has read in vain; raises
        DeadlineExceeded if that has not ended by then. 0 = not at all.
        """
        self._computed()
        if self._saving is not None and self._due:
            self._sweep(self._saving)
        self._hand_over()
        failed = self.judge()
        if quiet_s:
            self.quiet_failed(quiet_s)
        for push, layer in self._kept:
            if push.request not in failed:
                self._push(push, layer)
        if self._loads:
            self._worker.gates.release()
        return self._worker.report(self.number, failed)
