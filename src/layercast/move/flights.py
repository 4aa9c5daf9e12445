"""Flights that end on the host: what the CPU movers return, and what other code may complete by hand.

Knows nothing of copies, devices, gates or peers.
"""

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from layercast.errors import BadTransition, DeadlineExceeded
from layercast.move.base import Digests, Flight

_log = logging.getLogger("layercast.move")


class HostFlight:
    """A flight that whoever does the work ends once, by `land` or `fail`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._calls: list[Callable[[Flight], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it has ended; None if it landed or is still under way."""
        return self._error

    def wait(self, timeout_s: float) -> None:
        """Block until it has landed. Raises its error, or DeadlineExceeded after `timeout_s` seconds."""
        if not self._ended.wait(timeout_s):
            raise DeadlineExceeded(f"a copy has not ended within {timeout_s:g} s; it may still land later")
        if self._error is not None:
            raise self._error

    def then(self, call: Callable[[Flight], None]) -> None:
        """Call `call(flight)` once it has ended: at once if it has, else on the thread that ends it."""
        with self._lock:
            if not self._ended.is_set():
                self._calls.append(call)
                return
        call(self)

    def land(self) -> None:
        """End it well: every byte is in place. Raises BadTransition if it has ended."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """End it with `error`. Raises BadTransition if it has ended."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._ended.is_set():
                raise BadTransition("this flight has ended already; whoever does the work ends it once")
            self._error = error
            self._ended.set()
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call(self)
            except Exception:  # noqa: BLE001  a caller's mistake must not end the thread that serves everyone
                _log.exception("a callback of a flight raised; the flight itself has ended as it should")


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


def first_error(flights: Sequence[Flight]) -> BaseException | None:
    """The error of the first failed flight, if any."""
    return next((flight.error for flight in flights if flight.error is not None), None)
