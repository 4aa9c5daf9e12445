"""Flights on a device: an event that tells a stream, a word that tells a host thread, and the threads that end them.

A flight is *recorded* once its event stands behind its copies on a stream: from then on other streams can be made to
wait for it, though nothing may have moved yet. It has *landed* once the event has happened.
Does not know pieces, programs or gates.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from layercast.errors import DeadlineExceeded, LayercastError
from layercast.landing import Landing
from layercast.move.base import Flight
from layercast.move.cuda_driver import Driver
from layercast.move.flights import HostFlight
from layercast.move.words import DROPPED, POSTED, Words, post, sleep_on

_FOREVER_S = 3600.0
"""A watcher's longest sleep at a time. Whoever waits for what it watches has a deadline of its own."""


class Event:
    """A device event that goes back to where it came from with the last reference."""

    __slots__ = ("_back", "handle")

    def __init__(self, handle: int, back: Callable[[int], None]) -> None:
        self.handle = handle
        self._back = back

    def __del__(self) -> None:
        self._back(self.handle)


class Events:
    """Events to reuse. Once closed, those still out are given up as they come back."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: deque[int] = deque()
        self._back: Callable[[int], None] = self._free.append

    def take(self) -> Event:
        """An event that nobody else holds."""
        try:
            handle = self._free.popleft()
        except IndexError:
            handle = self._driver.event()
        return Event(handle, self._returned)

    def close(self) -> None:
        """Give up those in the pool."""
        self._back = self._driver.drop_event
        while self._free:
            self._driver.drop_event(self._free.popleft())

    def _returned(self, handle: int) -> None:
        self._back(handle)


class CudaFlight(HostFlight):
    """Copies on a device, from submission to landing. `words[index]` is posted when `event` is recorded."""

    def __init__(self, event: Event, words: Words, index: int, errors: npt.NDArray[np.int64]) -> None:
        super().__init__()
        self.event = event
        self._words = words
        self._index = index
        self._errors = errors

    @property
    def recorded(self) -> bool:
        """Whether a stream can wait for the event now. Never blocks."""
        return bool(self._words[self._index] == POSTED)

    def sleep_until_recorded(self, timeout_s: float) -> bool:
        """Block until it is recorded or dropped; whether that came within `timeout_s` seconds."""
        return sleep_on(self._words, self._index, timeout_s)

    def fail(self, error: BaseException) -> None:
        """End it with `error`; nobody need wait for its event."""
        if not self.recorded:
            post(self._words, self._index, DROPPED)
        super().fail(error)

    def sleep_until_happened(self, driver: Driver) -> None:
        """Block until its event has happened, or never will. For the watcher."""
        if self.sleep_until_recorded(_FOREVER_S) and self.recorded:
            with contextlib.suppress(LayercastError):  # whoever settles it learns of it again
                driver.sleep_until(self.event.handle)

    def settle(self, driver: Driver) -> None:
        """Block until its event has happened, then end it. For the watcher."""
        self.sleep_until_recorded(_FOREVER_S)
        if self._ended.is_set():
            return
        try:
            driver.check("a copy", int(self._errors[self._index]))
            driver.sleep_until(self.event.handle)
        except LayercastError as error:
            self.fail(error)
        else:
            self.land()


class Mark(CudaFlight):
    """An event on the caller's stream, recorded when made; nothing watches it until somebody asks."""

    def __init__(self, driver: Driver, event: Event, watch: Callable[[CudaFlight], None]) -> None:
        super().__init__(event, np.array([POSTED], np.int32), 0, np.zeros(1, np.int64))
        self._driver = driver
        self._watch = watch
        self._asked = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the work before it has finished. Never blocks."""
        if super().done:
            return True
        self._driver.bind()
        return self._driver.happened(self.event.handle)

    def wait(self, timeout_s: float) -> None:
        """Block until it has landed. Raises its error, or DeadlineExceeded."""
        self._ask()
        super().wait(timeout_s)

    def then(self, call: "Callable[[Landing], None]") -> None:
        """Call `call(self)` once it has landed."""
        super().then(call)
        self._ask()

    def _ask(self) -> None:
        """Have it watched, once."""
        if self._asked.acquire(blocking=False):
            self._watch(self)


class Watcher:
    """One thread that ends flights in the order in which they were handed to it."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._flights: queue.SimpleQueue[Sequence[CudaFlight]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_watch, args=(driver, self._flights), name=name, daemon=True)
        self._thread.start()

    def add(self, flights: Sequence[CudaFlight]) -> None:
        """End these, in the order of one stream, when the last of their events has happened."""
        self._flights.put(flights)

    def close(self, timeout_s: float) -> None:
        """End the thread once all it was given has ended. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        self._flights.put(())
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{self._thread.name}: copies have not ended within {timeout_s:g} s")


def _watch(driver: Driver, work: "queue.SimpleQueue[Sequence[CudaFlight]]") -> None:
    driver.bind()
    while flights := work.get():
        flights[-1].sleep_until_happened(driver)
        for flight in flights:
            flight.settle(driver)
        del flight, flights


def recorded_events(flights: "tuple[Flight, ...]") -> tuple[list[CudaFlight], list[Flight]]:
    """(flights that a stream can wait for, those that a host thread has to)."""
    ours = [flight for flight in flights if isinstance(flight, CudaFlight) and flight.recorded and not failed(flight)]
    return ours, [flight for flight in flights if flight not in ours]


def failed(flight: Flight) -> bool:
    """Whether it has ended with an error. Never blocks, nor has a mark watched."""
    return flight.error is not None
