"""Keeps a step's gates true to its loads: armed with what must end, opened by what ends, rearmed without what is late.

Does not know movers, requests or keys.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from layercast.flow.issue import Batch, Sent
from layercast.flow.runs import LoadRun
from layercast.move.base import Flight, Gate
from layercast.move.flights import HostFlight


class Gatekeeper:
    """One step's gates at a time."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        """What a layer waits on; where that is in vain, see `give_up`."""
        self._lock = threading.Lock()
        self._live: set[LoadRun] = set()
        self._due: dict[Batch, Flight | None] = {}
        """What the gates are closed for; its flights, as far as they count."""

    def arm(self, runs: Iterable[LoadRun]) -> None:
        """Close the gates of every layer that these loads move."""
        with self._lock:
            self._live = set(runs)
            self._rearm()

    def opened(self, sent: Iterable[Sent]) -> None:
        """Batches are under way: their layers' gates will count their ends."""
        with self._lock:
            fresh = {batch: flight for batch, flight, _ in sent if batch in self._due and self._due[batch] is None}
            self._due |= fresh
            passed = [(layer, flight.part(nth)) for one, flight in fresh.items() for layer, nth in one.parts.items()]
            if passed:
                self.gate.open_all(passed)

    def skip(self, batches: Sequence[Batch]) -> None:
        """Batches that will never be submitted count as ended."""
        over = HostFlight()
        over.land()
        self.opened([Sent(batch, over) for batch in batches])

    def release(self) -> None:
        """The step is over: nothing waits any more."""
        with self._lock:
            self._live, self._due = set(), {}
            self.gate.reset()

    def give_up(self, layer: int) -> list[LoadRun]:
        """The loads that were late for this layer; they no longer count."""
        with self._lock:
            late = [run for run in self._live if any(layer in batch.layers for batch in run.left())]
            self._live.difference_update(late)
            self._rearm()
        return late

    def _rearm(self) -> None:
        """Close the gates for exactly what the live loads still miss; what is not under way yet comes by `opened`."""
        known, self._due = self._due, {}
        for run in self._live:
            self._due |= {batch: known.get(batch) or flight for batch, flight in run.left().items()}
        self.gate.reset()
        queued = Counter(layer for batch, flight in self._due.items() if flight is None for layer in batch.layers)
        under_way = [(batch.parts, flight) for batch, flight in self._due.items() if flight is not None]
        self.gate.arm_behind(queued, under_way)
