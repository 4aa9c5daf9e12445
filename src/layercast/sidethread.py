"""A thread beside the others that runs jobs in turn, and that keeps no process from ending.

What waits for a disk or a network may wait for ever: an executor's threads are joined when the interpreter ends, this
one is not. Does not know what its jobs do, nor how long they may take.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from layercast.errors import Refused

T = TypeVar("T")
Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class SideThread:
    """One thread, from the first job on to the end of the last one before `close`. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, call: Callable[..., T], *args: object) -> Future[T]:
        """Run `call(*args)` once all before it is done. Raises Refused once closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise Refused(f"{self._name} is closed; make a new one")
            self._jobs.put((future, partial(call, *args)))
            if self._thread is None:
                self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
                self._thread.start()
        return future

    def close(self, drop: bool = False) -> None:
        """Take no more jobs. drop: cancel those that have not begun. Never blocks; a second call may drop, too."""
        with self._lock:
            self._closed = True
            with suppress(queue.Empty):
                while drop:
                    if (job := self._jobs.get_nowait()) is not None:
                        job[0].cancel()
            self._jobs.put(None)

    def join(self) -> None:
        """Block until it has ended: for those who know that all of its jobs have."""
        if self._thread is not None:
            self._thread.join()


def _work(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, call = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  one job's trouble is its own, and its waiter's to hear of
                future.set_exception(error)
        del job, future, call  # what they keep must not live until the next job comes
