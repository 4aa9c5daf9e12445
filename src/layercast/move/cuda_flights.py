"""Flights on a device: a number that the device counts up to, and the threads that end them on the host.

A lane counts the batches it has moved in a word of pinned memory (its *tally*). A flight has its number there as soon
as it stands in the lane's queue, where copies wait for it. A forward's stream may, once the device has been handed it.
It has landed once the count has come that far, which whoever asks sees at once; who wants to be told is told when its
whole wave has. Does not know pieces, programs or gates.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from layercast.errors import BrokenInvariant, DeadlineExceeded, LayercastError
from layercast.landing import Landing, Latch
from layercast.move.base import Flight
from layercast.move.cuda_bell import Bell
from layercast.move.cuda_driver import Call, Driver
from layercast.move.cuda_hold import ERRORS, FIRST, LATER, OVER, REFUSED, Hold
from layercast.move.cuda_pace import BEFORE, HANDED, HURRIED, QUEUED, keep
from layercast.move.cuda_rows import BELL, PACE, TALLY_BYTES
from layercast.move.cuda_tables import Tables
from layercast.move.flights import HostFlight
from layercast.move.naps import on_time
from layercast.move.words import address_of, counts_at, words_at

_MOST, _FAR = 0xFFFFFFFF, 1 << 30
_HANDED, _HURRIED, _QUEUED = PACE // 4 + 2 * HANDED, PACE // 4 + 2 * HURRIED, PACE // 4 + 2 * QUEUED
"""Where a tally has these counts, in words."""
NAP_S, LATE = 20e-6, 0.002
"""Between two looks at a count by a thread that waits for it: least seconds, and part of what it has waited so far."""


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


class Tally:
    """A lane's count of the batches it has moved, as a 32-bit word that the device writes and anybody waits for.

    Beside it, in TALLY_BYTES of pinned memory, how many the device has been handed. Numbers only ascend and may wrap
    round: what is compared is the difference. pace: (marks ahead, bytes from one to the next); None = none is kept.
    before: the address of the tally of the lane for which this one's stands aside, with its pace; 0 = none.
    """

    def __init__(self, address: int, ring: Call, pace: tuple[int, int] | None = None, before: int = 0) -> None:
        self.address = address
        self.queued = 0
        """Number of the last batch in the lane's queue."""
        self._bell = Bell(ring, sleeping=False)
        self._counts: memoryview | list[int] = counts_at(address, TALLY_BYTES // 4)
        words = words_at(address, TALLY_BYTES // 4)
        words[:] = 0
        words[BELL // 4 : PACE // 4] = np.array([self._bell.file, self._bell.one], np.int64).view(np.int32)
        self.pace = 0 if pace is None else address + PACE
        """Address of the pace that copies keep (see `cuda_pace`); 0 = none."""
        if pace is not None:
            keep(words[PACE // 4 :: 2], *pace)
        words[PACE // 4 + 2 * BEFORE :][:2] = np.array([before], np.int64).view(np.int32)

    def queue(self, count: int) -> int:
        """The first number of so many more batches. Called in the order of the queue."""
        first, self.queued = self.queued + 1, self.queued + count
        self._counts[_QUEUED] = self.queued & _MOST
        if _reaches(self.queued - _FAR, self._counts[_HURRIED]):
            # else what was hurried so long ago would look as if it were to come
            self._counts[_HURRIED] = self._counts[_HANDED]
        return first

    def reached(self, number: int) -> bool:
        """Whether that many batches have moved. Never blocks."""
        return _reaches(self._counts[0], number)

    def handed(self, number: int, timeout_s: float) -> bool:
        """Whether the device has been handed that many batches; waits up to `timeout_s` seconds."""
        deadline = 0.0
        while not _reaches(self._counts[_HANDED], number):
            deadline = deadline or time.monotonic() + timeout_s
            if not self._bell.heard(deadline - time.monotonic()):
                return False
        return True

    def hurry(self, number: int) -> None:
        """Somebody waits until the device has been handed that batch, so that no pace is kept before it."""
        if not self.hurries(number):
            self._counts[_HURRIED] = number & _MOST

    def hurries(self, number: int) -> bool:
        """Whether that batch is, or was, to be handed over without a pace."""
        return _reaches(self._counts[_HURRIED], number)

    def passed_over(self, number: int) -> None:
        """The device counts that batch though it has not been handed it, and never will be."""
        self._counts[_HANDED] = number & _MOST
        self._bell.ring()

    def close(self) -> None:
        """Nobody waits any more; who asks gets what the count came to, also once its memory is given back."""
        self._counts = list(self._counts)
        self._bell.close()


def _reaches(count: int, number: int) -> bool:
    """Whether a count that may have wrapped round has come that far."""
    return (count - number) & _MOST <= _MOST >> 1


class Awaited(HostFlight):
    """What has landed once the device says that an event has happened."""

    def __init__(self, driver: Driver, event: Event) -> None:
        super().__init__()
        self.driver = driver
        self.event = event

    def settle(self) -> None:
        """End it once the device has done it. For the watcher."""
        if super().done:
            return
        try:
            self.driver.sleep_until(self.event.handle)
        except LayercastError as error:
            self.fail(error)
        else:
            self.land()


class Wave(Awaited):
    """The flights of one submission: they are handed over together and end together, the event behind the last."""

    def __init__(self, driver: Driver, tally: Tally, count: int, event: Event) -> None:
        super().__init__(driver, event)
        self.tally = tally
        self.words: npt.NDArray[np.int64] = np.zeros(ERRORS + count, np.int64)
        """What a stream that is to wait is told from (see `cuda_hold`)."""
        self.errors = self.words[ERRORS:]
        """For each of them the code with which the device has refused it; 0 = none so far."""
        self.address = address_of(self.words)
        self.first = 0
        """The number of the first, from when `queued` is set."""
        self.queued = Latch()
        self.issued = Latch()
        """Set once the device has all of it, or has refused it."""
        self.tables: list[Tables] = []
        """What its programs have of the lane's pool, until they have been issued."""

    def number(self, index: int) -> int:
        """What the tally comes to with the flight of that index. Only once the wave is queued."""
        return (self.first + index) & _MOST

    @property
    def last(self) -> int:
        """What it comes to with the last of them. Likewise."""
        return self.number(len(self.errors) - 1)

    def queue(self) -> None:
        """Take the next numbers of the lane. Called in the order of its queue."""
        self.words[FIRST] = self.first = self.tally.queue(len(self.errors))
        self.queued.set()

    def _end(self, error: BaseException | None) -> None:
        self.words[OVER] = 1
        super()._end(error)


class CudaFlight:
    """One batch of a wave, from submission to landing, or a part of one.

    places: of its parts in the wave, ascending. last: the place of the batch's last part, itself unless given.
    """

    __slots__ = ("_last", "_places", "wave")

    def __init__(self, wave: Wave, places: Sequence[int], last: int | None = None) -> None:
        self.wave = wave
        self._places = places
        self._last = places[-1] if last is None else last

    def part(self, nth: int) -> "CudaFlight":
        """The flight of one part of a series."""
        return CudaFlight(self.wave, self._places[nth : nth + 1], self._last)

    @property
    def done(self) -> bool:
        """Whether the device has counted the last of it, or its wave has ended. Never blocks."""
        wave = self.wave
        return wave.done or (wave.queued.is_set() and wave.tally.reached(self.number))

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it has ended."""
        wave = self.wave
        if wave.error is not None or not (self.done and self.refusal):
            return wave.error
        return self.wave.driver.failure("a copy", self.refusal)

    def wait(self, timeout_s: float) -> None:
        """Block until it has landed. Raises its error, or DeadlineExceeded.

        Looks at the count by itself, ever more rarely: whoever is told by other threads hears 0.3 ms later.
        """
        if not self.done:
            with on_time():
                self._nap(timeout_s)
        if not self.done:
            raise DeadlineExceeded(f"not ended within {timeout_s:g} s; it may still land later")
        if (error := self.error) is not None:
            raise error

    def _nap(self, timeout_s: float) -> None:
        began, spent = time.monotonic(), 0.0
        while not self.done and spent < timeout_s:
            time.sleep(min(max(NAP_S, LATE * spent), timeout_s - spent))
            spent = time.monotonic() - began

    def then(self, call: Callable[[Flight], None]) -> None:
        """Call `call(self)` once it has ended."""
        self.wave.then(lambda _: call(self))

    @property
    def number(self) -> int:
        """What the lane's tally comes to with the last of it. Only once the wave is queued."""
        return (self.wave.first + self._places[-1]) & _MOST

    def handed(self, timeout_s: float = 0.0) -> bool:
        """Whether the device has it, or never will; waits up to `timeout_s` seconds, for which its batch is hurried."""
        wave = self.wave
        if wave.issued.is_set() or wave.done:
            return True
        deadline = time.monotonic() + timeout_s
        numbered = wave.queued.is_set() or wave.queued.wait(timeout_s)
        if not numbered or wave.issued.is_set():  # or it has failed, and its number is another's
            return numbered
        if timeout_s:
            wave.tally.hurry(wave.number(self._last))
        return wave.tally.handed(self.number, deadline - time.monotonic())

    def promised(self, timeout_s: float) -> bool:
        """Wait until the device has it and has not refused it."""
        return self.wave.issued.wait(timeout_s) and self.error is None and not self.refusal

    @property
    def refusal(self) -> int:
        """The first error code with which the device refused some of it; 0 = none so far."""
        errors = self.wave.errors
        return next((code for place in self._places if (code := int(errors[place]))), 0) if errors.any() else 0

    def hold(self, hold: Hold, stream: int) -> bool:
        """Have a stream wait for it, if it has not moved yet; False where the device has not been handed it.

        Nothing is done then: a thread whose launches wait in a full queue keeps the driver to itself, and what they
        wait for could never be handed over.
        """
        wave = self.wave
        code = hold(wave.address, wave.tally.address, self._places[-1], stream)
        if code >= REFUSED:
            wave.driver.check("cuStreamWaitValue32", code - REFUSED)
        return code != LATER


class Mark(Awaited):
    """An event on the caller's stream, recorded when made; nothing watches it until somebody asks."""

    def __init__(self, driver: Driver, event: Event, watch: "Callable[[Mark], None]") -> None:
        super().__init__(driver, event)
        self._watch = watch
        self._asked = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the work before it has finished. Never blocks."""
        if super().done:
            return True
        self.driver.bind()
        return self.driver.happened(self.event.handle)

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
        self._driver = driver
        self._flights: queue.SimpleQueue[Awaited | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self.halted = ""
        """Why no flight ends any more, if the thread has ended by itself."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, flight: Awaited) -> None:
        """End it when its event has happened."""
        with self._lock:
            self._flights.put(flight)
            halted = bool(self.halted)
        if halted:
            self._give_up()

    def close(self, timeout_s: float) -> None:
        """End the thread once all it was given has ended. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        self._closed = True
        self._flights.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise DeadlineExceeded(f"{self._thread.name}: copies have not ended within {timeout_s:g} s")

    def _run(self) -> None:
        flight: Awaited | None = None
        try:
            self._driver.bind()
            while (flight := self._flights.get()) is not None:
                flight.settle()
                flight = None  # what it keeps must not live until the next comes
        finally:
            if not self._closed:
                with self._lock:
                    self.halted = f"{self._thread.name} has ended, so no copy is known to land; restart the engine"
                    self._flights.put(flight)
                self._give_up()

    def _give_up(self) -> None:
        with suppress(queue.Empty):
            while True:
                flight = self._flights.get_nowait()
                if flight is not None and not flight.done:
                    flight.fail(BrokenInvariant(self.halted))


def standing(flight: Flight) -> bool:
    """Whether a stream can be made to wait for it, or need not, with no doubt that it goes well."""
    if isinstance(flight, CudaFlight):
        return flight.wave.issued.is_set() and flight.promised(0)
    return flight.error is None and (isinstance(flight, Mark) or flight.done)


def moving(flight: Flight) -> bool:
    """Whether a stream has something to wait for."""
    return isinstance(flight, Mark) or (isinstance(flight, CudaFlight) and not flight.done)
