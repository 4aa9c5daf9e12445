"""Keeps a step's gates true to its loads: armed with what must end, opened by what ends, rearmed without what is late.

Does not know movers, requests or keys.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence

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
        """What the gates are closed for."""
        self._flights: dict[Batch, Flight] = {}

    def arm(self, runs: Iterable[LoadRun]) -> None:
        """Close the gates of every layer that these loads move."""
        with self._lock:
            self._live = set(runs)
            self._rearm()

    def opened(self, sent: Iterable[Sent]) -> None:
        """Batches are under way: their layers' gates will count their ends."""
        with self._lock:
            fresh = {one.batch: one.flight for one in sent if one.batch in self._due and one.batch not in self._flights}
            self._flights |= fresh
            self._pass(fresh)

    def skip(self, batches: Sequence[Batch]) -> None:
        """Batches that will never be submitted count as ended."""
        over = HostFlight()
        over.land()
        self.opened([Sent(batch, over) for batch in batches])

    def release(self) -> None:
        """The step is over: nothing waits any more."""
        with self._lock:
            self._live, self._due, self._flights = set(), {}, {}
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
        known, self._due, self._flights, missing = self._flights, {}, {}, dict[int, int]()
        for run in self._live:
            self._due |= run.left()
        for batch, flight in self._due.items():
            if (flight := known.get(batch, flight)) is not None:
                self._flights[batch] = flight
            for layer in batch.layers:
                missing[layer] = missing.get(layer, 0) + 1
        self.gate.reset()
        self.gate.arm(missing)
        self._pass(self._flights)

    def _pass(self, flights: Mapping[Batch, Flight]) -> None:
        if flights:
            self.gate.open_all([passed for batch, flight in flights.items() for passed in _by_layer(batch, flight)])


def _by_layer(batch: Batch, flight: Flight) -> list[tuple[int, Flight]]:
    """For each layer the flight of what brings it."""
    if not batch.windows:
        return [(layer, flight) for layer in batch.layers]
    parts = [(window, flight.part(nth)) for nth, window in enumerate(batch.windows)]
    return [(layer, part) for window, part in parts for layer in window]
