"""One worker thread that runs jobs in the order they are submitted, each after the flights it names.

A job that waits for flights from elsewhere is parked, so that it delays nobody; it joins the queue when the last of
them ends. Flights of this line need no parking: they come earlier in the queue. Does not know what a job does.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from layercast.errors import BrokenInvariant, DeadlineExceeded, Refused
from layercast.move.base import Flight, run_and_tell
from layercast.move.flights import HostFlight, first_error


@dataclass(slots=True, eq=False)
class _Job:
    """What to run for a flight. `run` ends it, or sees to it that it is ended later."""

    flight: HostFlight
    run: Callable[[float], None]
    after: tuple[Flight, ...]
    keep: tuple[object, ...]
    queued: Callable[[], None]
    missing: int = 0
    ready_at: float = 0.0

    def fail(self, error: BaseException) -> None:
        """End it, if it has not ended."""
        if not self.flight.done:
            self.flight.fail(error)


@dataclass(slots=True, eq=False)
class _Aside:
    """Something else for the thread to do."""

    call: Callable[[], None]
    then: Callable[[BaseException | None], None]


Item = _Job | _Aside | None
"""What a line's thread gets; None = there is no more."""


class Jobs(Protocol):
    """A queue, as `queue.SimpleQueue`."""

    def put(self, item: Item, /) -> None:
        """Add an item. Never blocks."""
        ...

    def get(self) -> Item:
        """The next item; waits for one."""
        ...

    def get_nowait(self) -> Item:
        """The next item. Raises queue.Empty."""
        ...


class Line:
    """A queue of jobs and the thread that works on it, from construction to `close`."""

    def __init__(self, name: str, jobs: Jobs | None = None) -> None:
        self._changed = threading.Condition()
        self._parked: set[_Job] = set()
        self._queued: dict[Flight, _Job] = {}
        self._closed = False
        self.halted = ""
        """Why nothing is run any more, if the thread has ended by itself."""
        self._jobs: Jobs = queue.SimpleQueue() if jobs is None else jobs
        self._thread = threading.Thread(target=_work, args=(self._jobs, self._died), name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        flight: HostFlight,
        run: Callable[[float], None],
        after: Sequence[Flight] = (),
        keep: Sequence[object] = (),
        queued: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `run(ready_at)` on the thread once all of `after` have ended; it ends `flight`. Never blocks.

        ready_at: seconds of time.monotonic at which nothing but this line held the job back. queued: called as the job
        joins the queue, in the order of the queue.
        If one of `after` failed, `flight` fails with its error and `run` is not called. Raises Refused once closed.
        """
        job = _Job(flight, run, tuple(after), tuple(keep), queued)
        with self._changed:
            if self._closed:
                raise Refused("this mover is closed; make a new one")
            foreign = [other for other in after if not other.done and other not in self._queued]
            job.missing = len(foreign)
            if foreign:
                self._parked.add(job)
            else:
                self._enqueue(job)
        for other in foreign:
            other.then(lambda _: self._arrived(job))

    def aside(self, call: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        """Run `call()` on the thread, in its turn, and then `then(its error)`. Never blocks, and never raises."""
        with self._changed:
            refused = self._closed
            if not refused:
                self._jobs.put(_Aside(call, then))
        if refused:
            then(Refused("this mover is closed; make a new one"))

    def close(self, timeout_s: float) -> None:
        """Finish every job and end the thread. Refuses new ones at once.

        Raises DeadlineExceeded after `timeout_s` seconds; flights still parked then fail with it.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not (self._parked or self._queued), timeout_s)
            abandoned, self._parked = self._parked, set()
        late = DeadlineExceeded(f"the mover was closed and what this copy waits for has not ended in {timeout_s:g} s")
        for job in abandoned:
            job.fail(late)
        self._jobs.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if abandoned or self._thread.is_alive():
            raise DeadlineExceeded(
                f"{self._thread.name}: not everything submitted has ended within {timeout_s:g} s; "
                f"{len(abandoned)} copies that wait for others were given up"
            )

    def _died(self) -> None:
        """The thread has ended by itself: nothing that it has not done will be done, and nothing new is taken."""
        with self._changed:
            self._closed = True
            self.halted = f"{self._thread.name} has ended, so nothing is copied any more; restart the engine"
            lost = [*self._queued.values(), *self._parked]
            self._parked.clear()
        error = BrokenInvariant(self.halted)
        with suppress(queue.Empty):
            while True:
                if isinstance(waiting := self._jobs.get_nowait(), _Aside):
                    waiting.then(error)
        for job in lost:
            job.fail(error)

    def _enqueue(self, job: _Job) -> None:
        """With the lock held, so that `_queued` has the order of the queue."""
        job.ready_at = time.monotonic()
        self._queued[job.flight] = job
        job.queued()
        job.flight.then(self._forget)
        self._jobs.put(job)

    def _arrived(self, job: _Job) -> None:
        with self._changed:
            job.missing -= 1
            if job.missing == 0 and job in self._parked:
                self._parked.remove(job)
                self._enqueue(job)

    def _forget(self, flight: Flight) -> None:
        with self._changed:
            self._queued.pop(flight, None)
            self._changed.notify_all()


def _work(jobs: Jobs, died: Callable[[], None]) -> None:
    over = False
    try:
        while (job := jobs.get()) is not None:
            if isinstance(job, _Aside):
                run_and_tell(job.call, job.then)
                continue
            try:
                error = first_error(job.after)
                if error is None:
                    job.run(job.ready_at)
                else:
                    job.fail(error)
            except Exception as error:  # noqa: BLE001  one job's trouble is its own
                job.fail(error)
            del job  # what it keeps must not live until the next job comes
        over = True
    finally:
        if not over:  # also while the line is being closed
            died()
