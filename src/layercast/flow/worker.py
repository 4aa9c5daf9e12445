"""The worker side of one rank: turns a step's orders into copies, gates and reports.

Works by slot and block number. Does not know keys, leases, or why something moves.
"""

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from layercast.errors import Missing, Refused
from layercast.flow.batches import Ways
from layercast.flow.gatekeeper import Gatekeeper
from layercast.flow.issue import Batch, Issuer, Sent
from layercast.flow.layer_step import LayerStep
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
from layercast.move.base import Flight, Gate, Mover, Waits
from layercast.move.flights import delayed
from layercast.observe.timeline import OFF, Timeline
from layercast.plan.pieces import Pieces


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
        self._loads: list[LoadRun] = []
        self._background: list[LoadRun] = []
        """Those of `_loads` that no forward reads and whose request still waits for them."""
        self._said: list[LoadRun] = []
        """Those of `_loads` that were said to have come while a part was still to land; a forward is to wait for it."""
        self._saves: list[SaveRun] = []

    def begin(self, orders: StepOrders, after: Sequence[Flight] = ()) -> LayerStep:
        """Start a step: plan and issue its loads, take note of its saves and pushes.

        after: what loads must not overtake (on a device, work of the engine on the blocks that they fill).
        Raises BadBlocks for ids of loads that can't be, before anything of the step moves; saves of such ids fail.
        """
        for request in orders.aborts:
            self.abort(request)
        if self.ways.stagger_s and (orders.loads or orders.background):
            after = (*after, delayed(self.ways.stagger_s))
        loads = dict(self._load(order, after) for order in orders.loads)
        background = dict(self._load(order, after, behind=True) for order in orders.background)
        arrivals = dict(map(self._receive, orders.receives))
        joined = self._join(orders.joins)
        self._loads += [*loads, *arrivals, *background]
        self._background += background
        queued = [self.issuer.drop(run.id) for run in joined]
        for run in joined:
            run.behind = self.mover.whole_steps  # a device has it, in its order
        if loads or joined:  # together, as each layer waits for all of them
            self.issuer.add_loads([*itertools.chain(*loads.values(), *queued)])
        for run, flights in arrivals.items():
            _follow(run, flights)
        for batches in background.values():
            self.issuer.add_loads(batches, Waits.NOBODY)
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

        One whose rest may come later counts as landed, once the loads before it leave time for that: the forwards that
        name it in their `joins` wait for the rest. A failed one may still be landing: its blocks are quiet only once
        its outcome has been reported.
        """
        now = time.monotonic()
        for run in self._background:
            first_s = run.clocking.first_s
            if first_s is not None and now - first_s > self.ways.config.lease_s:
                run.fail(LoadEnd.LATE, f"had not landed after {self.ways.config.lease_s:g} s")
        over, before = dict[LoadRun, LoadEnd | None](), 0
        most = max((run.hidden_bytes for run in self._background), default=0)
        every = dict.fromkeys((*self._loads, *self._background))
        for run in sorted(every, key=lambda run: run.behind):  # in the order in which they come
            # It may fail at any time. In this order: what has settled is told with its end, as nothing of it is left to
            # join; each once: what is said to have come while a part is to land is what a forward is to join.
            hidden, end = run.hidden(before), run.end
            if run in self._background and (hidden or end is not None):
                over[run] = end
            if before < most and (end is None or self.mover.whole_steps):  # a device moves on what it has of any
                before += run.left_bytes
        self._background = [run for run in self._background if run not in over]
        self._said += [run for run, end in over.items() if end is None]
        self._said = [run for run in self._said if not run.landed]
        return [(run.order.request, end or LoadEnd.LANDED) for run, end in over.items()]

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

    def _load(self, order: LoadOrder, after: Sequence[Flight], behind: bool = False) -> tuple[LoadRun, list[Batch]]:
        run = LoadRun(order, order.id, self, behind=behind)
        batches = self.ways.load_batches(run, order, tuple(after), self.mover.whole_steps)
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
        return [run for run in named if not run.landed]

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
