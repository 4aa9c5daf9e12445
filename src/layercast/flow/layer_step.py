"""One forward of a worker, layer by layer: what each waits for, what is handed off once it is written, and the verdict.

Knows layers and what was ordered for them. Does not know blocks, slots, or how anything moves.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from layercast.errors import DeadlineExceeded, DeviceFailed, Missing
from layercast.flow.orders import LoadEnd, LoadOrder, PushOrder, ReceiveOrder, StepOrders, StepReport
from layercast.flow.runs import LoadRun, SaveRun
from layercast.move.base import Flight
from layercast.observe.timeline import SpanKind

if TYPE_CHECKING:
    from layercast.flow.worker import Worker

HANDED_OVER = 16
"""Saved windows handed over at a time: to wake the thread that copies costs the forward more than all the rest."""
Ready = tuple[Sequence[int], Flight]
"""Layers that are written, and what their copies wait for."""


class LayerStep:
    """One forward of a worker (see `flow.step.Step`)."""

    def __init__(self, worker: "Worker", orders: StepOrders, loads: list[LoadRun]) -> None:
        self._worker = worker
        self._orders = StepOrders(orders.step)
        self._timeline = worker.timeline
        self._loads = loads
        self._saving: SaveRun | None = None
        self._window_of: Mapping[int, Sequence[int]] = {}
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
            self._window_of = self._worker.ways.save_windows(orders.saves)
            self._due = {layer: self._window_of[layer] for layer in self._saving.layers}

    @property
    def number(self) -> int:
        """The step's, as its orders have it."""
        return self._orders.step

    def wait(self, layer: int) -> None:
        """Before the layer reads cached KV. Never raises.

        What is late by `layer_wait_ms`, or can't be waited for, fails its request alone.
        """
        timeline, recording = self._timeline, self._timeline.on
        if not self._loads and not recording:
            return
        self._waited.add(layer)
        if recording:
            self._computed()
        try:
            blocked = self._worker.gates.gate.wait(layer, self._timeout_s)
        except DeadlineExceeded:
            blocked = self._timeout_s
            for run in self._worker.gates.give_up(layer):
                run.fail(LoadEnd.LATE, f"layer {layer} had not arrived after {self._timeout_s:g} s")
        except DeviceFailed as error:
            blocked = 0.0
            for run in self._worker.gates.give_up(layer):
                run.fail(LoadEnd.LOST, f"layer {layer} can't be waited for: {error}")
        if blocked:
            for run in self._loads:
                if layer in run.layers:
                    run.clocking.waited(blocked)
        if recording:
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
        window_of, due = self._window_of, self._due.keys()
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
