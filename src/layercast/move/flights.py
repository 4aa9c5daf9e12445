"""Flights that end on the host: what the CPU movers return, and what other code may complete by hand.

Knows nothing of copies, devices, gates or peers.
"""

import threading
from collections.abc import Sequence

import numpy as np

from layercast.errors import BadTransition
from layercast.landing import Landing
from layercast.move.base import Digests, Flight


class HostFlight(Landing):
    """A flight that whoever does the work ends once, by `land` or `fail`."""


class HostDigestFlight(HostFlight):
    """A flight that carries digests."""

    def __init__(self) -> None:
        super().__init__()
        self._digests: Digests = np.zeros(0, np.uint64)

    @property
    def digests(self) -> Digests:
        """One uint64 a row. Raises BadTransition before it has landed."""
        if not self.done or self.error is not None:
            raise BadTransition("there are no digests of a flight that has not landed; wait for it first")
        return self._digests

    def land_with(self, digests: Digests) -> None:
        """End it well with its result."""
        self._digests = digests
        self.land()


def landed() -> HostFlight:
    """A flight that has landed."""
    flight = HostFlight()
    flight.land()
    return flight


def delayed(seconds: float) -> HostFlight:
    """A flight that lands so many seconds from now: what waits for it starts then, and nothing spins meanwhile."""
    flight = HostFlight()
    timer = threading.Timer(seconds, flight.land)
    timer.daemon = True
    timer.start()
    return flight


def first_error(flights: Sequence[Flight]) -> BaseException | None:
    """The error of the first failed flight, if any."""
    return next((flight.error for flight in flights if flight.error is not None), None)
