"""A device made of host memory whose calls come back at once and are carried out later, as a real one's.

Each stream is a thread with a queue of bounded length. A call keeps the driver's one lock, also while it waits for room
in a queue, so what can't be handed over meanwhile shows. Copies of a direction take turns, at a rate if one is given,
and their bytes move at the end of their time. Nothing waits for ever: what does not come about in time is noted in
`troubles`, and from then on nothing waits at all, so that a test that fails ends.
"""

import gc
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
from host_device import HostDevice, nothing

from layercast.control import memory, node
from layercast.move import cuda_gates
from layercast.move.costs import Costs, Direction
from layercast.move.cuda import CudaMover
from layercast.move.cuda_driver import DEVICE, Calls
from layercast.move.cuda_hold import plain_hold
from layercast.move.cuda_issue import Issue, plain_issue
from layercast.move.kernels.pieces import PieceKernel

CALLER = 0
"""The stream of an engine that computes on its own thread: whoever gives it something carries that out at once."""
LOOK_AGAIN_S = 0.01
"""A host may set a word that a stream waits for, and tells nobody."""


class Turns:
    """A lock that is had in the order in which it was asked for: of a plain one a thread that gives it up and asks
    again at once may be first, so that on many cores one stream would keep an engine from another for seconds."""

    def __init__(self) -> None:
        self._asking, self._mine = threading.Lock(), threading.Lock()
        self._behind: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._asking:
            if self._mine.acquire(blocking=False):
                return
            self._behind.append(turn := threading.Lock())
            turn.acquire()
        turn.acquire()  # until it is handed on

    def __exit__(self, *_: object) -> None:
        with self._asking:
            (self._behind.popleft() if self._behind else self._mine).release()


class AsyncDevice(HostDevice):
    """longest: what a queue holds. gb_s: rate of copies of a direction; 0 = as fast as it goes.

    patience_s: how long anything may wait before it counts as trouble. queues: of all streams together, each of which
    is carried out in the order in which it was filled, as if CUDA_DEVICE_MAX_CONNECTIONS were so few; 0 = one a stream.
    """

    pci = "0000:00:00.0"

    def __init__(self, longest: int = 1024, gb_s: float = 0.0, patience_s: float = 10.0, queues: int = 0) -> None:
        super().__init__()
        self.gb_s, self._most = gb_s, queues
        self.troubles: list[str] = []
        self._longest, self._patience_s = longest, patience_s
        self._driver, self._changed = threading.Lock(), threading.Condition()
        self._recorded: Counter[int] = Counter()
        """How often each event has been recorded; it has happened once the last of these is carried out."""
        self._happened: set[tuple[int, int]] = set()
        """(event, which of its records) that are carried out."""
        self._engines = {kind: Turns() for kind in range(3)}
        self._queues: dict[int, queue.Queue] = {}
        self._threads: dict[queue.Queue, threading.Thread] = {}
        self._dropped: list[np.ndarray] = []
        self.compute = self.stream(urgent=False)
        """The stream of the engine's launches."""

    def launch(self, work: Callable[[], object] = nothing, seconds: float = 0.0) -> None:
        """A kernel of the engine's, which takes its time and has its effect at the end of it."""
        self._do(self.compute, partial(_slowly, work, seconds))

    def synchronize(self) -> None:
        """Wait until all that the device has been given by now is done."""
        for stream in [*self._queues]:
            done = threading.Event()
            self._do(stream, done.set)
            if not done.wait(self._patience_s):
                self._stuck(f"stream {stream} does not come to its end")

    def end(self) -> None:
        """End the engine's stream, and what a test has left."""
        for stream in [*self._queues]:
            self.drop_stream(stream)

    def close(self) -> None:
        """The same, where everything else that was made has been given back, and nothing has waited in vain."""
        self.drop_stream(self.compute)
        gc.collect()  # an error keeps the frame that it was raised in, and that its flight
        assert (self._threads, self.live, self.pinned, self.troubles) == ({}, set(), {}, [])

    def _do(self, stream: int, work: Callable[[], object]) -> None:
        if stream == CALLER:
            work()
            return
        with self._driver:
            try:
                self._queues[stream].put(work, timeout=self._patience_s)
            except queue.Full:
                self._stuck(f"a launch on stream {stream} waits for room, and keeps the driver to itself")

    def _move(self, rows: list[tuple[int, int, int]]) -> None:
        with self._engines[self.kind_of(rows[0][1])]:
            nbytes = sum(size for _, _, size in rows)
            _slowly(partial(super()._move, rows), nbytes / self.gb_s / 1e9 if self.gb_s else 0.0)

    def _record(self, event: int, stream: int):
        stream, _ = super()._record(event, stream)
        self._recorded[event] += 1
        return stream, partial(self._happens, event, self._recorded[event])

    def _happens(self, event: int, nth: int) -> None:
        with self._changed:
            self._happened.add((event, nth))
            self._changed.notify_all()

    def _wait(self, stream: int, event: int, flags: int):
        stream, _ = super()._wait(stream, event, flags)
        return stream, partial(self._until, partial(self._has_happened, event, self._recorded[event]))

    def _sleep(self, event: int):
        super()._sleep(event)
        return CALLER, partial(self._until, partial(self._has_happened, event, self._recorded[event]))

    def _finish(self, stream: int):
        done = threading.Event()
        self._do(stream, done.set)
        return CALLER, partial(self._until, done.is_set)

    def _has_happened(self, event: int, nth: int) -> bool:
        return not nth or (event, nth) in self._happened

    def _set(self, word, value: int) -> None:
        with self._changed:
            super()._set(word, value)
            self._changed.notify_all()

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._patience_s
        with self._changed:
            while not (holds() or self.troubles):
                self._changed.wait(LOOK_AGAIN_S)
                if time.monotonic() > deadline:
                    self._stuck(f"{threading.current_thread().name} waits in vain: {holds}")

    def _stuck(self, what: str) -> None:
        self.troubles.append(what)

    def _work(self, jobs: queue.Queue) -> None:
        while (work := jobs.get()) is not None:
            try:
                work()
            except AssertionError as error:
                self._stuck(f"{threading.current_thread().name}: {work} went wrong: {error}")

    def happened(self, event: int) -> bool:
        with self._driver:
            return self._has_happened(event, self._recorded[event])

    def stream(self, *, urgent: bool) -> int:
        stream, users = super().stream(urgent=urgent), Counter(self._queues.values())
        if self._most and len(users) == self._most:
            self._queues[stream] = min(users, key=users.__getitem__)
            return stream
        self._queues[stream] = jobs = queue.Queue(self._longest)
        thread = self._threads[jobs] = threading.Thread(target=self._work, args=(jobs,), name=f"stream-{stream}")
        thread.start()
        return stream

    def drop_stream(self, stream: int) -> None:
        super().drop_stream(stream)
        jobs = self._queues.pop(stream)
        if jobs not in self._queues.values():
            jobs.put(None)
            self._threads.pop(jobs).join()

    def drop_host_memory(self, address: int) -> None:
        """As a driver does, not while the device may still look at it. Who looks at it later finds other numbers."""
        self.synchronize()
        array = self.memory[address][2]
        array[:] = 0xFF
        self._dropped.append(array)
        super().drop_host_memory(address)

    drop_device_memory = drop_host_memory

    @contextmanager
    def in_place_of_cuda(
        self,
        stream: int,
        issue: Callable[[Calls, tuple[int, int]], Issue] = plain_issue,
        kernel: PieceKernel | None = None,
        costs: dict[Direction, Costs] | None = None,
    ) -> Iterator[None]:
        """Meanwhile a worker that is opened takes its engine's memory for this device's, and `stream` for its launches.

        The others as `CudaMover` has them.
        """

        def mover_of(_device: int) -> CudaMover:
            mover = CudaMover(self, kernel, issue(self.calls, self.batch_attributes), lambda: stream, 3 << 16)
            mover.prefer(costs or {})
            return mover

        def opened(engine, *rest):
            self.memory |= {at.base: (DEVICE, at.end - at.base, None) for group in engine.groups for at in group.planes}
            return memory.open_memory(engine, *rest)

        with (
            mock.patch.object(node, "open_memory", opened),
            mock.patch.object(memory, "device_holding", return_value=self.device),
            mock.patch.object(memory.CudaMover, "of", mover_of),
            mock.patch.object(cuda_gates, "torch_stream", return_value=stream),
            mock.patch.object(cuda_gates, "best_hold", plain_hold),
        ):
            yield


def _slowly(work: Callable[[], object], seconds: float) -> None:
    if seconds:
        time.sleep(seconds)
    work()
