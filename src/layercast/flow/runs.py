"""A load and a save under way, from the first batch to the outcome.

Both count what has ended, layer by layer, and keep no opinion on what happens next. Thread-safe: batches end on the
mover's thread while the forward's thread asks. Do not know queues, movers or gates.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from layercast.flow.issue import Batch, Sent
from layercast.flow.orders import LoadEnd, LoadOrder, LoadOutcome, ReceiveOrder, SaveOrder, SaveOutcome
from layercast.move.base import DigestFlight, Digests, Flight
from layercast.observe.timeline import SpanKind
from layercast.plan.pieces import CopyPlan
from layercast.spec.groups import Group

Ints = npt.NDArray[np.int64]


class Kept(NamedTuple):
    """Slots of a group in the order of a digest's rows, and the digests taken at saving: [row of a layer, nth slot].

    A copy made as the load is ordered: should its lease end too early, its slots may become another's, digests and all.
    """

    slots: Ints
    rows: Mapping[int, int]
    taken: Digests


@dataclass(slots=True)
class Clocking:
    """When a run's first batch was submitted, when its last one ended, and how long a forward waited for it.

    exposed_s: None = not known, as a device's stream waits by itself.
    """

    first_s: float | None = None
    last_s: float = 0.0
    exposed_s: float | None = 0.0

    def start(self, at_s: float) -> None:
        """Note the first submission."""
        if self.first_s is None:
            self.first_s = at_s

    def waited(self, seconds: float) -> None:
        """A forward's thread has waited for it."""
        if self.exposed_s is not None:
            self.exposed_s += seconds

    @property
    def transfer_s(self) -> float:
        """Seconds from the first submission to the last end."""
        return 0.0 if self.first_s is None else max(0.0, self.last_s - self.first_s)


class Overseer(Protocol):
    """Who a load reports to while it is under way."""

    def opened(self, sent: Sequence[Sent]) -> None:
        """Batches were submitted."""
        ...

    def stopped(self, run: "LoadRun") -> None:
        """The load has failed; what is still queued need not be moved."""
        ...


@dataclass(eq=False)
class LoadRun:
    """One load, or one receive, of a step."""

    kind: ClassVar[SpanKind] = SpanKind.LOAD
    order: LoadOrder | ReceiveOrder
    id: str
    overseer: Overseer
    kept: dict[int, Kept] = field(default_factory=dict)
    """What the slots of each group must hash to; none are compared of a group that is not here."""
    behind: bool = False
    """Whether it moves behind all that a forward waits for, in the order of its like."""
    clocking: Clocking = field(default_factory=Clocking)
    layers: frozenset[int] = frozenset()
    end: LoadEnd | None = None
    reason: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _left: dict[Batch, Flight | None] = field(default_factory=dict)
    """What has not ended; the flights of what is with the mover."""
    _moved: int = 0
    _pieces: int = 0
    _bad: list[tuple[int, int]] = field(default_factory=list)

    def plan(self, batches: Sequence[Batch]) -> None:
        """Take note of every batch that must end before the load has."""
        self._left = dict.fromkeys(batches)
        self.layers = frozenset().union(*[batch.layers for batch in batches])

    @property
    def settled(self) -> bool:
        """Whether no batch is queued or in flight any more, so that the target blocks are quiet."""
        return not self._left

    def left(self) -> Mapping[Batch, Flight | None]:
        """Batches that have not ended; their flights, where they are under way."""
        with self._changed:
            return dict(self._left)

    @property
    def landed(self) -> bool:
        """Whether all of it is in place. In this order: a verdict comes before the count of what it is on."""
        return self.settled and self.end is None

    def hidden(self, before: int) -> bool:
        """Whether it has settled, or what is left of it and of `before` bytes that come first may come later."""
        return self.settled or (before < self.hidden_bytes and before + self.left_bytes <= self.hidden_bytes)

    @property
    def hidden_bytes(self) -> int:
        """Bytes at its end that may come later than it is said to have come."""
        return self.order.hidden_bytes if isinstance(self.order, LoadOrder) else 0

    @property
    def left_bytes(self) -> int:
        """Bytes that are still to land. Of what a device has whole, it is looked up how far it has come."""
        left = self.left()
        under_way = [(batch, flight) for batch, flight in left.items() if flight is not None]
        done = sum(batch.nbytes * _share_done(batch, flight) // len(batch.layers) for batch, flight in under_way)
        return sum(batch.nbytes for batch in left) - done

    def decided(self, layers: Collection[int], timeout_s: float) -> bool:
        """Whether it has failed, or nothing in these layers can be read too early or unchecked any more.

        Waits up to `timeout_s` seconds.
        """
        due = set(layers)
        if not self._open(due, self.left(), timeout_s):
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self.end is not None or not self._open(due, self._left, 0), timeout_s)

    @staticmethod
    def _open(layers: set[int], left: Mapping[Batch, Flight | None], timeout_s: float) -> bool:
        return any(
            flight is None or not flight.promised(timeout_s)
            for batch, flight in left.items()
            if not layers.isdisjoint(batch.layers)
        )

    def submitted(self, sent: Sequence[Sent], since_s: float) -> None:
        """Batches are with the mover."""
        self.clocking.start(since_s)
        with self._changed:
            self._left.update((batch, flight) for batch, flight, _ in sent if batch in self._left)
        self.overseer.opened(sent)

    def ended(self, over: Sequence[Sent]) -> None:
        """Batches landed or failed: check their digests, count them."""
        bad: list[tuple[int, int]] = []
        # The verdict comes before the count: whoever sees that nothing is left sees a failure too.
        for batch, flight, digests in over:
            if flight.error is not None:
                self.fail(LoadEnd.LOST, str(flight.error))
            elif differ := _differing(batch, digests, self.kept):
                self.fail(LoadEnd.CORRUPT, f"{len(differ)} blocks differ from what was saved, in layers {batch.layers}")
                bad += differ
        with self._changed:
            for batch, flight, _ in over:
                self._left.pop(batch, None)
                if flight.error is None:
                    self._moved += batch.nbytes
                    self._pieces += batch.pieces.size[1]
            self.clocking.last_s = time.monotonic()
            self._bad += bad
            self._changed.notify_all()

    def fail(self, end: LoadEnd, reason: str) -> None:
        """Decide the load's end, once; a later reason changes nothing."""
        with self._changed:
            if self.end is not None:
                return
            self.end, self.reason = end, reason
            self._changed.notify_all()
        self.overseer.stopped(self)

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Batches that will never be submitted."""
        with self._changed:
            for batch in batches:
                self._left.pop(batch, None)

    def outcome(self, verified: bool) -> LoadOutcome:
        """The end, once settled."""
        end = self.end or LoadEnd.LANDED
        return LoadOutcome(
            id=self.id,
            request=self.order.request,
            end=end,
            nbytes=self._moved,
            pieces=self._pieces,
            layers=len(self.layers),
            verified=verified and end is LoadEnd.LANDED,
            transfer_s=self.clocking.transfer_s,
            exposed_s=self.clocking.exposed_s,
            reason=self.reason,
            bad_slots=tuple(sorted(set(self._bad))),
        )


class Arrived(Protocol):
    """What has come of a push."""

    @property
    def nbytes(self) -> int:
        """Bytes that the peer has put into our blocks."""
        ...


@dataclass(eq=False)
class ReceiveRun(LoadRun):
    """A push that a step's attention waits for; its bytes are counted, and checked, where they arrive."""

    arrived: Arrived = field(kw_only=True)

    def outcome(self, verified: bool) -> LoadOutcome:
        """The end, once settled."""
        return msgspec.structs.replace(super().outcome(verified), nbytes=self.arrived.nbytes)


def _share_done(batch: Batch, flight: Flight) -> int:
    """Of a batch's layers those whose part has landed; parts land in order."""
    parts = [*batch.parts.values()]
    return bisect_left(range(len(parts)), True, key=lambda nth: not flight.part(parts[nth]).done)


def _differing(batch: Batch, digests: Sequence[DigestFlight], kept: Mapping[int, Kept]) -> list[tuple[int, int]]:
    """(group, slot) of every block whose digest is not the one taken at saving."""
    bad: list[tuple[int, int]] = []
    for layer, got in zip(batch.layers, digests, strict=True) if digests else ():
        slots, rows, taken = kept[batch.group]
        bad += [(batch.group, slot) for slot in slots[taken[rows[layer]] != got.digests].tolist()]
    return bad


@dataclass(eq=False)
class SaveRun:
    """The saves of one step: layers to cover, layers covered, and where their digests go.

    They move together, so one that fails to be copied fails all of them. `id` owns their batches.
    """

    kind: ClassVar[SpanKind] = SpanKind.SAVE
    orders: Sequence[SaveOrder]
    groups: Sequence[Group]
    """All of the layout."""
    sizes: Sequence[int]
    """Bytes of a block of each."""
    store: Sequence[Digests]
    rows: Sequence[Mapping[int, int]]
    """For each group the row of each layer in its store."""
    plans: Mapping[int, CopyPlan] = field(default_factory=dict)
    """What moves of each group, once anything is to be handed over."""
    error: BaseException | None = None
    swept: set[int] = field(default_factory=set)
    """Layers that no hook has announced."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _left: set[Batch] = field(default_factory=set)
    _covered: set[int] = field(default_factory=set)
    _copies: int = 0
    _aborted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.id = self.orders[0].id if self.orders else ""
        moved = {pair.group for order in self.orders for pair in order.pairs if pair.blocks}
        self.layers = {layer for group in moved for layer in self.groups[group].layers}

    def queue(self, batches: Sequence[Batch]) -> bool:
        """Take note of batches that must end before their layers are covered; False: it is over, don't submit them."""
        with self._lock:
            if self.error is None:
                self._left.update(batches)
            return self.error is None

    def submitted(self, sent: Sequence[Sent], since_s: float) -> None:
        """Nothing waits for a save."""

    def ended(self, over: Sequence[Sent]) -> None:
        """Batches landed or failed: record their digests, count their layers."""
        for batch, flight, digests in over:
            if flight.error is None and digests:
                slots = self.plans[batch.group].pairs()[1]
                rows, store = self.rows[batch.group], self.store[batch.group]
                for layer, digest in zip(batch.layers, digests, strict=True):
                    store[rows[layer], slots] = digest.digests
        with self._lock:
            for batch, flight, _ in over:
                self._left.discard(batch)
                if flight.error is not None:
                    self.error = self.error or flight.error
                else:
                    self._copies += batch.pieces.size[1]
            left = {layer for other in self._left for layer in other.layers}
            done = {layer for batch, flight, _ in over if flight.error is None for layer in batch.layers}
            self._covered |= done - left

    def give_up(self, error: BaseException) -> None:
        """End it as failed; nothing more of it is submitted."""
        with self._lock:
            self.error = self.error or error

    def abort(self, request: str) -> None:
        """Have nothing of a request count as saved. What moves goes on."""
        self._aborted.add(request)

    @property
    def settled(self) -> bool:
        """Whether it is over: every layer covered, or failed with nothing in flight."""
        with self._lock:
            return not self._left and (self.error is not None or self._covered == self.layers)

    def outcomes(self) -> list[SaveOutcome]:
        """The end of each save, once settled. The copies that all of them took count with the first."""
        copies, outcomes, told = self._copies, [], dict[frozenset[int], tuple[int, int]]()
        for order in self.orders:
            groups = frozenset(pair.group for pair in order.pairs)
            if groups not in told:
                layers = {layer for group in groups for layer in self.groups[group].layers}
                told[groups] = len(layers & self._covered), len(layers & self.swept)
            why = "" if self.error is None else str(self.error)
            why = why or ("the request was aborted" if order.request in self._aborted else "")
            nbytes = 0 if why else sum(self.sizes[pair.group] * len(pair.slots) for pair in order.pairs)
            outcomes.append(SaveOutcome(order.id, order.request, not why, nbytes, *told[groups], why, copies))
            copies = 0
        return outcomes
