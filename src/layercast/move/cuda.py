"""The mover of an NVIDIA GPU: whole steps of copies, issued by a thread of its own in one call, ended by events.

Each direction (host to device, device to host, inside a memory) has a thread that issues, a thread that ends flights,
and keeps its order; across directions say `after`. Copies wait on the device for marks and flights that are under way,
and the host waits for nothing but flights from elsewhere. Does not know layers, gates, requests or keys.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from layercast.errors import DeadlineExceeded, Refused
from layercast.move.base import DigestFlight, Digests, Flight, Mover
from layercast.move.cuda_driver import DEVICE, PAGEABLE, Driver
from layercast.move.cuda_flights import CudaFlight, Events, Mark, Watcher, recorded_events
from layercast.move.cuda_issue import Issue, best_issue
from layercast.move.cuda_lane import Lane
from layercast.move.cuda_program import Program, cut_both
from layercast.move.cuda_ways import Costs, Direction, Rows, Way, rows_of
from layercast.move.flights import HostDigestFlight, HostFlight
from layercast.move.kernels.pieces import PieceKernel, compiled
from layercast.move.line import Line
from layercast.move.raw import digests_of
from layercast.plan.pieces import DigestRanges, Pieces

STAGING_BYTES = 192 << 20
"""Device memory that a direction stages in, at most: three layers of 8,192 tokens of an 8B model, and then some."""
READ_BACK_BYTES = 32 << 20
"""Pinned memory through which device memory is read to be hashed."""


@dataclass(frozen=True, slots=True)
class _Arm:
    """What works on one direction."""

    lane: Lane
    line: Line
    watcher: Watcher


@dataclass(frozen=True, slots=True)
class _Signals:
    """Addresses of 32-bit words: the flights' own, those to set behind each batch, those each batch waits for."""

    words: int
    flags: Sequence[int]
    behind: Sequence[int]


class CudaMover(Mover):
    """Copies between this process's memory and one device, and inside that device.

    current_stream: the handle of the stream that the caller's compute is queued on; torch's where not given.
    issue: how programs are run (see cuda_issue). kernel: None = copies go by the copy engine alone.
    staging_bytes: device memory a direction may stage in; 0 = none.
    """

    def __init__(
        self,
        driver: Driver,
        kernel: PieceKernel | None = None,
        issue: Issue | None = None,
        current_stream: Callable[[], int] | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._driver = driver
        self._kernel = kernel
        self._issue = issue or best_issue(driver.calls, driver.batch_attributes)
        self._current_stream = current_stream or torch_stream
        self._staging_limit = staging_bytes
        self._events = Events(driver)
        self._lock = threading.Lock()
        self._arms: dict[Direction, _Arm] = {}
        self._closed = False
        self._staged = 0
        self._cuts = np.zeros(0, np.int64)
        self._read_back = (0, 0)

    @classmethod
    def of(cls, device: int = 0, staging_bytes: int = STAGING_BYTES) -> "CudaMover":
        """A mover with all it can have on this machine. Raises Refused where there is no device."""
        driver = Driver(device)
        try:
            kernel = compiled(device)
        except Refused:
            kernel = None
        return cls(driver, kernel, staging_bytes=staging_bytes)

    def submit(self, pieces: Pieces, *, after: Sequence[Flight] = (), keep: Sequence[object] = ()) -> CudaFlight:
        """Copy `pieces`, all in one direction, behind `after`. Returns at once. Raises Refused once closed."""
        return self.submit_all([pieces], after=after, keep=keep)[0]

    def submit_all(
        self,
        batches: Sequence[Pieces],
        *,
        after: Sequence[Flight] = (),
        keep: Sequence[object] = (),
        flags: Sequence[int] = (),
        behind: Sequence[int] = (),
    ) -> list[CudaFlight]:
        """Copy several batches, all in one direction and in this order, behind `after`; a flight for each.

        They are issued in one call, without the interpreter lock. flags: for each batch the address of a 32-bit word,
        in pinned or device memory, that the device sets to 1 behind it; behind: likewise a word that it waits for. A
        word that nobody sets holds this direction for good. Returns at once. Raises Refused once closed.
        """
        if not batches:
            return []
        arm = self._arm(self._direction(batches))
        count = len(batches)
        words, errors = np.zeros(count, np.int32), np.zeros(count, np.int64)
        flights = [CudaFlight(self._events.take(), words, index, errors) for index in range(count)]
        events, others = recorded_events(tuple(after))

        def run(_ready_at: float) -> None:
            hurdles = [flight.event.handle for flight in events]
            self._driver.bind()
            # All of a step end together: waking a thread for each costs the caller's launches, and gates need none.
            arm.watcher.add(flights)
            # The first batches move while the program of the others is written.
            for part in _growing(count):
                program, signals = (
                    Program(self._cuts),
                    _Signals(words.ctypes.data + 4 * part.start, flags[part], behind[part]),
                )
                self._write(program, arm.lane, batches[part], flights[part], hurdles, signals)
                self._issue(program.table(), errors[part])
                hurdles = []

        arm.line.submit(flights[0] if count == 1 else _whole(flights), run, others, keep)
        return flights

    def digest(self, ranges: DigestRanges, *, after: Sequence[Flight] = ()) -> DigestFlight:
        """One 64-bit XXH3 a row, computed by the host: device memory is read back for it, so this costs bandwidth."""
        arm = self._arm(Direction.LOCAL)
        flight = HostDigestFlight()
        _, others = recorded_events(tuple(after))

        def run(_ready_at: float) -> None:
            self._driver.bind()
            for other in after:
                if isinstance(other, CudaFlight):
                    self._driver.sleep_until(other.event.handle)
            flight.land_with(self._digests(arm.lane, ranges))

        arm.line.submit(flight, run, others)
        return flight

    def mark(self) -> Flight:
        """An event on the caller's current stream."""
        self._driver.bind()
        event = self._events.take()
        self._driver.check("cuEventRecord", self._driver.calls.record(event.handle, self._current_stream()))
        return Mark(self._driver, event, self._watch)

    @property
    def driver(self) -> Driver:
        """The device it works on."""
        return self._driver

    @property
    def staging_bytes(self) -> int:
        """Most bytes of device and pinned memory taken for staging since the start."""
        return self._staged

    def prefer(self, costs: dict[Direction, Costs]) -> None:
        """Choose ways by these costs from now on."""
        for direction, cost in costs.items():
            self._arm(direction).lane.costs = cost

    def cut_at(self, addresses: Sequence[int]) -> None:
        """Let no copy of the engine cross these, where pieces of host memory that were pinned apart meet."""
        self._cuts = np.unique(np.concatenate([self._cuts, np.array(addresses, np.int64)]))

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted, end the threads, give the memory back. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
        late: DeadlineExceeded | None = None
        for direction, arm in list(self._arms.items()):
            try:
                arm.line.close(max(0.0, deadline - time.monotonic()))
                arm.watcher.close(max(0.0, deadline - time.monotonic()))
            except DeadlineExceeded as error:
                late = late or error
            else:
                self._driver.bind()
                arm.lane.close()
                del self._arms[direction]
        if late is not None:
            raise late
        if self._read_back[0]:
            self._driver.drop_host_memory(self._read_back[0])
            self._read_back = (0, 0)
        self._events.close()

    def _direction(self, batches: Sequence[Pieces]) -> Direction:
        first = next((pieces for pieces in batches if len(pieces)), None)
        if first is None:
            return Direction.LOCAL
        self._driver.bind()
        up, down = (self._driver.kind_of(int(side[0])) == DEVICE for side in (first.target, first.source))
        return Direction.LOCAL if up == down else Direction.UP if up else Direction.DOWN

    def _arm(self, direction: Direction) -> _Arm:
        """The direction's threads and streams, made when first used."""
        with self._lock:
            if self._closed:
                raise Refused("this mover is closed; make a new one")
            if direction not in self._arms:
                self._driver.bind()
                lane = Lane(self._driver, direction, self._kernel, self._staging_limit)
                self._staged += lane.staging.nbytes
                name = f"layercast-cuda-{direction}"
                self._arms[direction] = _Arm(lane, Line(name), Watcher(self._driver, f"{name}-landing"))
            return self._arms[direction]

    def _watch(self, flight: CudaFlight) -> None:
        self._arm(Direction.LOCAL).watcher.add([flight])

    def _write(
        self,
        program: Program,
        lane: Lane,
        batches: Sequence[Pieces],
        flights: Sequence[CudaFlight],
        hurdles: list[int],
        signals: "_Signals",
    ) -> None:
        """The batches as a program."""
        rows = rows_of(list(batches))
        if lane.direction is Direction.DOWN:  # host memory takes ascending addresses faster
            rows = rows.take(np.lexsort((rows.target, rows.batch)))
        came, target, source, length = cut_both(rows.target, rows.source, rows.length, self._cuts)
        rows = rows if came is None else Rows(source, target, length, rows.batch[came])
        pinned = self._pinned(rows)
        way = lane.way(rows) if pinned else Way.ENGINE
        started = lane.start(program, hurdles, way)
        ends = np.searchsorted(rows.batch, np.arange(len(batches)), side="right").tolist()
        stream = lane.copy
        for index, (first, last) in enumerate(zip(chain([0], ends), ends, strict=False)):
            program.owner = index
            if signals.behind:
                lane.hold_until(program, signals.behind[index], way)
            stream = lane.move(program, rows.take(slice(first, last)), way, pinned=pinned)
            program.record(flights[index].event.handle, stream)
            if signals.flags:
                program.write(stream, signals.flags[index])
            program.post(signals.words + 4 * index)
        lane.finish(program, started, stream)

    def _pinned(self, rows: Rows) -> bool:
        """Whether the device reaches all of it: a slab is pinned from its start on, so the ends say so."""
        ends = [end for side in (rows.source, rows.target) if len(side) for end in (int(side.min()), int(side.max()))]
        return all(self._driver.kind_of(end) != PAGEABLE for end in ends)

    def _digests(self, lane: Lane, ranges: DigestRanges) -> Digests:
        """Digests of ranges anywhere; those of device memory by way of pinned memory, some rows at a time."""
        if not ranges.address.size or self._driver.kind_of(int(ranges.address[0, 0])) != DEVICE:
            return digests_of(ranges)
        row_bytes = max(1, int(ranges.length.sum()))
        at_once = max(1, READ_BACK_BYTES // row_bytes)
        buffer = self._read_back_buffer(min(at_once, len(ranges.address)) * row_bytes)
        offsets = np.cumsum(ranges.length) - ranges.length
        event = self._events.take()
        parts = []
        for first in range(0, len(ranges.address), at_once):
            source = ranges.address[first : first + at_once]
            target = buffer + np.arange(len(source))[:, None] * row_bytes + offsets
            length = np.broadcast_to(ranges.length, source.shape)
            program, errors = Program(), np.zeros(1, np.int64)
            some = length > 0
            program.copies(target[some], source[some], length[some], lane.copy, batched=self._driver.batches)
            program.record(event.handle, lane.copy)
            self._issue(program.table(), errors)
            self._driver.check("reading back what is to be hashed", int(errors[0]))
            self._driver.sleep_until(event.handle)
            parts.append(digests_of(DigestRanges(target, ranges.length)))
        return np.concatenate(parts)

    def _read_back_buffer(self, nbytes: int) -> int:
        """Pinned memory of at least so many bytes, kept for the next time."""
        address, size = self._read_back
        if size < nbytes:
            if address:
                self._driver.drop_host_memory(address)
            self._read_back = (self._driver.host_memory(nbytes), nbytes)
            self._staged += nbytes - size
        return self._read_back[0]


def torch_stream() -> int:
    """The handle of torch's current stream on this thread."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def _growing(count: int) -> list[slice]:
    """Parts of 1, 3, 12, 48, ... batches, of 1, 4, 16, 64 together."""
    ends = [1, *(4**nth for nth in range(1, count.bit_length() // 2 + 2))]
    return [slice(first, min(last, count)) for first, last in pairwise([0, *ends]) if first < count]


def _whole(flights: Sequence[CudaFlight]) -> HostFlight:
    """A flight that lands once the last of `flights` has ended, and whose failure is that of all of them."""
    whole = HostFlight()
    whole.then(lambda _: _fail_rest(flights, whole))
    flights[-1].then(lambda _: None if whole.done else whole.land())
    return whole


def _fail_rest(flights: Sequence[CudaFlight], whole: HostFlight) -> None:
    if whole.error is not None:
        for flight in flights:
            if not flight.done:
                flight.fail(whole.error)
