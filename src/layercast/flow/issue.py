"""Hands batches to a mover in deadline order, at most `depth` of them at a time.

Batches are issued by whoever makes room: the caller that adds one, then the mover's own thread as flights end. So the
forward's thread issues at most `depth` batches, and no thread exists for issuing alone. Loads go before saves.
A mover of whole steps (a device's) is handed everything at once: all that a forward waits for, or has saved, in one
call, and what goes in the background load by load, as there it stands aside by itself: a thread that handed over the
next part whenever one has ended would take the interpreter from the forward's, part after part.
Does not know what a batch is for, gates or keys.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from layercast.errors import DeadlineExceeded
from layercast.move.base import DigestFlight, Flight, Mover, Waits
from layercast.move.flights import HostFlight, landed
from layercast.observe.timeline import OFF, SpanKind, Timeline
from layercast.plan.order import DeadlineQueue
from layercast.plan.pieces import DigestRanges, Pieces, Series

_log = logging.getLogger("layercast")

LAST = 1 << 20
"""Above any layer: from here on what no forward waits for is queued, load after load."""


class Run(Protocol):
    """A load, a push or a step's saves under way: told of its batches on any thread, of several at once if possible."""

    @property
    def kind(self) -> SpanKind:
        """How its copies appear in a timeline."""
        ...

    def submitted(self, sent: Sequence["Sent"], since_s: float) -> None:
        """These batches are with the mover, since `time.monotonic()` was that; each has ended once its flight has."""
        ...

    def ended(self, over: Sequence["Sent"]) -> None:
        """These batches have ended, well or not (`flight.error`)."""
        ...


Hashed = Callable[[int], DigestRanges]


class Batch(msgspec.Struct, frozen=True, eq=False):
    """One submission: pieces, then digests of what they moved.

    hashed: what the digest of each layer covers; None = there are none.
    layers: what it brings nearer to complete; its first is the layer that waits for it. part_of: for each layer the
    part of a series that brings it.
    nbytes: of its pieces. group: whose blocks it moves, by its index in the layout.
    """

    run: Run
    owner: str
    layers: tuple[int, ...]
    pieces: Pieces | Series
    hashed: Hashed | None = None
    after: tuple[Flight, ...] = ()
    nbytes: int = 0
    group: int = 0
    part_of: Mapping[int, int] = {}

    @property
    def parts(self) -> Mapping[int, int]:
        """For each layer the part that brings it."""
        return self.part_of or dict.fromkeys(self.layers, 0)


class Sent(NamedTuple):
    """A batch that is with the mover, and what ends when it and its digests have."""

    batch: Batch
    flight: Flight
    digests: Sequence[DigestFlight] = ()


class Issuer:
    """The queue of loads, the queue of saves behind it, and the count of batches in flight."""

    def __init__(self, mover: Mover, depth: int, keep: Sequence[object] = (), timeline: Timeline = OFF) -> None:
        self._mover = mover
        self._timeline = timeline
        self._line_free_s = 0.0
        self._depth = depth
        self._keep = tuple(keep)
        self._lock = threading.Condition()
        self._loads: DeadlineQueue[Batch] = DeadlineQueue()
        self._saves: deque[Batch] = deque()
        self._in_flight = 0
        self._preparing = 0
        """Calls that the mover's thread has been asked to make."""
        self._pumping = False
        self.peak_in_flight = 0

    def add_loads(self, batches: Iterable[Batch], waits: Waits = Waits.BUSY) -> None:
        """Queue batches that a layer waits for, or (those of one load) that a request waits for in the background.

        There a load goes after those before it: were they to take turns, all would come as late as the last.
        """
        if self._mover.whole_steps:
            self._hand_over(sorted(batches, key=_first_layer), waits)
            return
        with self._lock:
            behind = max(LAST, self._loads.last_layer + 1) if waits is Waits.NOBODY else 0
            for batch in batches:
                self._loads.push(batch, layer=behind or batch.layers[0], owner=batch.owner)
        self._pump()

    def add_saves(self, batches: Sequence[Batch]) -> None:
        """Queue batches that nobody waits for."""
        if self._mover.whole_steps:
            self._hand_over(batches)
            return
        with self._lock:
            self._saves.extend(batches)
        self._pump()

    def aside(self, call: Callable[[], None], lost: Callable[[BaseException], None]) -> None:
        """Let the mover's thread prepare and add batches; `lost(error)` if it can't. What it adds is waited for."""
        with self._lock:
            self._preparing += 1

        def ended(error: BaseException | None) -> None:
            if error is not None:
                lost(error)
            with self._lock:
                self._preparing -= 1
                self._lock.notify_all()

        self._mover.aside(call, ended)

    def drop(self, owner: str) -> list[Batch]:
        """Take back what is still queued for a load or save; what is in flight goes on."""
        with self._lock:
            dropped = self._loads.remove(owner)
            kept = [batch for batch in self._saves if batch.owner != owner]
            dropped += [batch for batch in self._saves if batch.owner == owner]
            self._saves = deque(kept)
        return dropped

    def wait_idle(self, timeout_s: float) -> None:
        """Block until nothing is queued or in flight. Raises DeadlineExceeded after `timeout_s` seconds."""
        self.wait_until(lambda: not (self._preparing or self._in_flight or self._loads or self._saves), timeout_s)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Block until something that ended batches bring about holds. Raises DeadlineExceeded."""
        with self._lock:
            if not self._lock.wait_for(holds, timeout_s):
                raise DeadlineExceeded(f"{self._in_flight} batches have not ended within {timeout_s:g} s")

    def _pump(self) -> None:
        """Submit while there is room. One thread pumps at a time; the others leave their change to it."""
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while batches := self._next():
            self._submit(batches)

    def _hand_over(self, batches: Sequence[Batch], waits: Waits = Waits.BUSY) -> None:
        """Submit all of it, whatever else is in flight."""
        if batches:
            with self._lock:
                self._in_flight += len(batches)
            self._submit(batches, waits)

    def _submit(self, batches: Sequence[Batch], waits: Waits = Waits.BUSY) -> None:
        pieces, after = [batch.pieces for batch in batches], [batch.after for batch in batches]
        flights: Sequence[Flight]
        since_s = time.monotonic()  # whoever submits may be held up while a device copies already
        try:
            flights = self._mover.submit_all(pieces, after=after, keep=self._keep, waits=waits)
        except Exception as error:  # noqa: BLE001  what a mover can't do fails its batches, and no thread
            flights = [_failed_behind(landed(), error) for _ in batches]
        self._follow(batches, flights, since_s)

    def _next(self) -> list[Batch]:
        """What may go now of what is queued: loads and then saves, up to `depth` in flight."""
        batches: list[Batch] = []
        with self._lock:
            while len(batches) < self._depth - self._in_flight and (self._loads or self._saves):
                batches.append(self._loads.pop() or self._saves.popleft())
            self._in_flight += len(batches)
            self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
            self._pumping = bool(batches)
            return batches

    def _follow(self, batches: Sequence[Batch], flights: Sequence[Flight], since_s: float) -> None:
        """Tell runs of what is under way, and see to it that they hear of its end before any gate does.

        Flights of a mover of whole steps end together, or nearly, so there the last one speaks for all of them.
        """
        sent = [
            Sent(batch, flight) if batch.hashed is None else self._sent(batch, flight, batch.hashed)
            for batch, flight in zip(batches, flights, strict=True)
        ]
        for part in [sent] if self._mover.whole_steps else [[one] for one in sent]:
            self._await(part, since_s)
        for run, mine in _by_run(sent):
            run.submitted(mine, since_s)

    def _await(self, part: Sequence[Sent], submitted_s: float) -> None:
        part[-1].flight.then(lambda _: self._ended(part, submitted_s))

    def _sent(self, batch: Batch, last: Flight, hashed: Hashed) -> Sent:
        digests: list[DigestFlight] = []
        try:
            for layer in batch.layers:
                last = digest = self._mover.digest(hashed(layer), after=(last,))
                digests.append(digest)
        except Exception as error:  # noqa: BLE001  what a mover can't do fails one batch, and no thread
            last = _failed_behind(last, error)
        return Sent(batch, last, digests)

    def _ended(self, part: Sequence[Sent], submitted_s: float) -> None:
        if late := [one for one in part if not one.flight.done]:
            part = [one for one in part if one.flight.done]
            self._await(late, submitted_s)
        for run, mine in _by_run(part):
            try:
                run.ended(mine)
            except Exception:  # noqa: BLE001  a mistake in one run must not take a place in flight with it
                _log.exception("a run raised when it was told that a batch has ended")
        if self._timeline.on:
            # The mover keeps order, so a batch began when it was submitted or when the one before it had ended.
            start_s, self._line_free_s = max(submitted_s, self._line_free_s), time.monotonic()
            for batch, _, _ in part:
                for layer in batch.layers:
                    nbytes = batch.nbytes // len(batch.layers)
                    self._timeline.record(batch.run.kind, layer, start_s, self._line_free_s, batch.owner, nbytes)
        with self._lock:
            self._in_flight -= len(part)
            self._lock.notify_all()
        self._pump()


def _first_layer(batch: Batch) -> int:
    return batch.layers[0]


def _by_run(sent: Sequence[Sent]) -> Iterable[tuple[Run, Sequence[Sent]]]:
    runs: dict[Run, list[Sent]] = {}
    for one in sent:
        runs.setdefault(one.batch.run, []).append(one)
    return runs.items()


def _failed_behind(last: Flight, error: Exception) -> Flight:
    """A flight that fails, but only once what was submitted before the error moves no more."""
    failed = HostFlight()
    last.then(lambda _: failed.fail(error))
    return failed
