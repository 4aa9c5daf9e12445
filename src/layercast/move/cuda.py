"""The mover of an NVIDIA GPU: whole steps of copies, issued by a thread of its own in one call.

Each direction (to the device, from it, inside it, to a peer) has a thread that issues and one that ends flights, and
keeps its order. What goes in the background has all that for itself, and stands aside. Across these say `after`. Copies
wait on the device for marks and for flights that the device has; the host waits for nothing but flights from elsewhere.
Does not know layers, gates, requests or keys.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from layercast.errors import DeadlineExceeded, Refused
from layercast.move.base import DigestFlight, Digests, Flight, Mover, Waits
from layercast.move.costs import Costs, Direction, Way
from layercast.move.cuda_costs import SOON_S, measured_costs
from layercast.move.cuda_desk import Desk
from layercast.move.cuda_driver import DEVICE, Driver
from layercast.move.cuda_flights import CudaFlight, Events, Mark, Watcher, Wave, moving, standing
from layercast.move.cuda_issue import Issue, best_issue
from layercast.move.cuda_lane import Lane
from layercast.move.cuda_orders import Orders, Run
from layercast.move.cuda_pin import Pinning
from layercast.move.cuda_places import all_pinned, direction_of
from layercast.move.cuda_program import EVERYBODYS, Ints, Program
from layercast.move.flights import HostDigestFlight
from layercast.move.kernels.pieces import PieceKernel, compiled_or_none
from layercast.move.line import Line
from layercast.move.raw import digests_of
from layercast.plan.pieces import DigestRanges, Pieces, Series

STAGING_BYTES = 64 << 20
"""Device memory that a direction stages in, at most: two layers of 8,192 tokens of an 8B model, a call a slot."""
READ_BACK_BYTES = 32 << 20
"""Pinned memory through which device memory is read to be hashed."""


@dataclass(frozen=True, slots=True)
class _Arm:
    """What works on one direction, or on what goes that way in the background (True)."""

    lane: Lane
    desk: Desk
    line: Line
    watcher: Watcher


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
        self._issue = issue or best_issue(driver.calls, driver.batch_attributes)
        self._current_stream = current_stream or torch_stream
        self._lane = partial(Lane, driver, kernel=kernel, staging_limit=staging_bytes)
        self._events = Events(driver)
        self._lock = threading.Lock()
        self._arms: dict[tuple[Direction, bool], _Arm] = {}
        self._closed = False
        self._cuts = np.zeros(0, np.int64)
        self._pinnings: list[Pinning] = []
        self._read_back = (0, 0)

    @classmethod
    def of(cls, device: int = 0, staging_bytes: int = STAGING_BYTES, peers: Sequence[int] = ()) -> "CudaMover":
        """A mover with all it can have on this machine, which chooses by what its links cost.

        peers: other devices whose memory it may copy from and to. Measures a device or link it has not met before, for
        a second or less. Raises Refused where there is no device, or no way from it to a peer's memory.
        """
        driver, kernel = Driver(device), compiled_or_none(device)
        mover = cls(driver, kernel, staging_bytes=staging_bytes)
        for peer in peers:
            driver.reach(peer)
        trial = cls(driver, kernel, staging_bytes=staging_bytes)  # by one that gives back what measuring took
        costs = measured_costs(trial, kernel=kernel is not None, peers=[Driver(peer) for peer in peers])
        trial.close(SOON_S)
        mover.prefer(costs)
        return mover

    def submit(self, pieces: Pieces, *, after: Sequence[Flight] = (), keep: Sequence[object] = ()) -> CudaFlight:
        """Copy `pieces`, all in one direction, behind `after`. Returns at once. Raises Refused once closed."""
        return self.submit_all([pieces], after=[after], keep=keep)[0]

    def submit_all(
        self,
        batches: Sequence[Pieces | Series],
        *,
        after: Sequence[Sequence[Flight]] = (),
        keep: Sequence[object] = (),
        waits: Waits = Waits.IDLE,
        flags: Sequence[int] = (),
        behind: Sequence[int] = (),
    ) -> list[CudaFlight]:
        """Copy several batches, all in one direction, begun in this order, each behind its own `after`; a flight each.

        None may touch memory that another of them writes: by the kernel they overlap. They are issued in one call,
        without the interpreter lock. Of series the parts go by their turns, those of turn 0 (as plain pieces) in the
        order of the batches. waits: see `Mover`. flags: for each batch the address of a 32-bit word, in pinned or
        device memory, that the device sets to 1 behind it; behind: likewise a word that it waits for. A word that
        nobody sets holds this direction for good. Returns at once. Raises Refused once closed.
        """
        count = len(batches)
        after, flags, behind = after or ((),) * count, flags or (0,) * count, behind or (0,) * count
        lists = {id(flights): flights for flights in after}  # most wait for the very same
        others = [flight for flights in lists.values() for flight in flights if not standing(flight)]
        if others and len(lists) > 1:  # what waits for others must not hold up the rest
            rows = zip(batches, after, flags, behind, strict=True)
            one = partial(self.submit_all, keep=keep, waits=waits)
            alone = [one([b], after=[a], flags=[f], behind=[h]) for b, a, f, h in rows]
            return [flight for (flight,) in alone]
        if not batches:
            return []
        series = [batch if isinstance(batch, Series) else Series(batch, np.array([batch.shift])) for batch in batches]
        self._driver.bind()
        arm = self._arm(direction_of(self._driver, series), background=waits is Waits.NOBODY)
        if not others:
            arm.desk.stir()
        hurdles = {key: [flight for flight in flights if moving(flight)] for key, flights in lists.items()}
        orders = Orders(series, [hurdles[id(flights)] for flights in after], flags, behind, waits)
        return self._submit(arm, orders, others, keep)

    def _submit(self, arm: _Arm, orders: Orders, others: Sequence[Flight], keep: Sequence[object]) -> list[CudaFlight]:
        lane, runs, laid = arm.lane, orders.runs(), False
        wave = Wave(self._driver, lane.tally, sum(len(run.parts) for run in runs), self._events.take())
        wave.then(lambda _: self._ended(lane, wave))
        choice, pinned = None, False
        early: Program | None = None
        table: Ints | None = None

        def queued() -> None:
            nonlocal laid
            wave.queue()
            if table is not None:
                laid = arm.desk.lay(table, self._cuts, wave.errors, wave.first)

        def run(_ready_at: float) -> None:
            for flight in others:
                if isinstance(flight, CudaFlight):
                    self._driver.check("a copy that this one waits for", flight.refusal)
            if laid:
                lane.tables.give_back(wave.tables, wave.last)
            else:
                how = self._choice(lane, orders) if others else (choice, pinned)
                for program in [early] if early else self._programs(lane, orders, runs, wave, *how):
                    self._issue.run(program.table(), self._cuts, wave.errors, wave.first)
                    lane.tables.give_back(wave.tables, wave.last)
            wave.issued.set()
            arm.watcher.add(wave)

        behind = [flight.wave if isinstance(flight, CudaFlight) else flight for flight in others]
        try:
            if not others:
                choice, pinned = self._choice(lane, orders)
                if choice and (early := self._early(lane, orders, runs, wave, choice, pinned=pinned)):
                    table = early.table()
            arm.line.submit(wave, run, behind, keep, queued)
        except BaseException as error:
            if not wave.done:
                wave.fail(error)
            raise
        return [CudaFlight(wave, places) for places in orders.places(runs)]

    def _ended(self, lane: Lane, wave: Wave) -> None:
        """What waits on a device for a wave that was never handed to one must not wait for ever, nor its tables."""
        if wave.issued.is_set():
            return
        number = wave.last if wave.queued.is_set() else None
        try:
            if number is not None:
                self._driver.bind()
                lane.skip(number, wave.tables)
        finally:  # where the device is lost, nothing waits on it
            lane.tables.give_back(wave.tables, number)
            wave.issued.set()
            wave.queued.set()

    def digest(self, ranges: DigestRanges, *, after: Sequence[Flight] = ()) -> DigestFlight:
        """One 64-bit XXH3 a row, computed by the host: device memory is read back for it, so this costs bandwidth."""
        arm = self._arm(Direction.LOCAL)
        flight = HostDigestFlight()
        arm.line.submit(flight, lambda _ready_at: flight.land_with(self._digests(arm.lane, ranges)), after)
        return flight

    def mark(self) -> Flight:
        """An event on the caller's current stream."""
        self._driver.bind()
        event = self._events.take()
        self._driver.record(event.handle, self._current_stream())
        return Mark(self._driver, event, self._watch)

    def aside(self, call: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        """Run `call` on the thread that copies from the device, once the caller's own leaves it the interpreter."""
        try:
            line = self._arm(Direction.DOWN).line
        except Refused as error:
            then(error)
        else:
            line.aside(call, then)

    @property
    def whole_steps(self) -> bool:
        """True: a step is handed over in one call."""
        return True

    @property
    def driver(self) -> Driver:
        """The device it works on."""
        return self._driver

    @property
    def staging_bytes(self) -> int:
        """Bytes of device and pinned memory taken for staging, which are kept until it is closed."""
        return self._read_back[1] + sum(arm.lane.staging.nbytes for arm in list(self._arms.values()))

    @property
    def halted(self) -> str:
        """Why the device is lost, or a thread has ended by itself."""
        workers = [worker for arm in list(self._arms.values()) for worker in (arm.line, arm.watcher)]
        return self._driver.lost or next((worker.halted for worker in workers if worker.halted), "")

    def prefer(self, costs: dict[Direction, Costs]) -> None:
        """Choose ways by these costs from now on."""
        for direction in costs:
            self._arm(direction)
        for (direction, _), arm in list(self._arms.items()):
            arm.lane.costs = costs.get(direction, arm.lane.costs)

    def follow(self, pinning: Pinning) -> None:
        """Take note of memory that is being pinned: copies keep to its seams, and go singly until it is done."""
        self.cut_at(pinning.cuts)
        self._pinnings.append(pinning)

    def cut_at(self, addresses: Sequence[int]) -> None:
        """Let no copy of the engine cross these, where pieces of host memory that were pinned apart meet."""
        self._cuts = np.unique(np.concatenate([self._cuts, np.array(addresses, np.int64)]))

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted, end the threads, give the memory back. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
        late: DeadlineExceeded | None = None
        for arm in self._arms.values():
            try:
                arm.line.close(max(0.0, deadline - time.monotonic()))
                arm.watcher.close(max(0.0, deadline - time.monotonic()))
                arm.lane.tables.close(max(0.0, deadline - time.monotonic()))
            except DeadlineExceeded as error:
                late = late or error
        if late is not None:
            raise late
        self._driver.bind()
        for key, arm in list(self._arms.items()):  # only now, as copies may wait for the count of any other
            arm.lane.close()
            arm.desk.close()
            del self._arms[key]
        if self._read_back[0]:
            self._driver.drop_host_memory(self._read_back[0])
            self._read_back = (0, 0)
        self._events.close()

    def _arm(self, direction: Direction, background: bool = False) -> _Arm:
        """The direction's threads and streams, made when first used."""
        before, key = self._arm(direction).lane if background else None, (direction, background)
        with self._lock:
            if self._closed:
                raise Refused("this mover is closed; make a new one")
            if key not in self._arms:
                self._driver.bind()
                lane = self._lane(direction, before=before)
                name = f"layercast-cuda-{direction}" + background * "-aside"
                desk = Desk(self._issue, self._driver.calls.ring, self._driver.bind)
                self._arms[key] = _Arm(lane, desk, Line(name, desk), Watcher(self._driver, f"{name}-landing"))
            return self._arms[key]

    def _watch(self, mark: Mark) -> None:
        self._arm(Direction.LOCAL).watcher.add(mark)

    def _choice(self, lane: Lane, orders: Orders) -> tuple[Way | None, bool]:
        """(how a wave goes as a whole; None = part by part, whether the device reaches all of it). On any thread."""
        batches, waits = orders.batches, orders.waits
        pinned = all_pinned(self._driver, self._pinnings, lane.direction, batches)
        choice = lane.choice(batches, waits) if pinned else Way.ENGINE
        if choice is not Way.STAGED and pinned and len(batches) > 1 and lane.choice(batches[:1], waits) is not choice:
            return None, pinned
        return choice, pinned

    def _early(
        self, lane: Lane, orders: Orders, runs: Sequence[Run], wave: Wave, way: Way, *, pinned: bool
    ) -> Program | None:
        """The wave as one program, before it stands in the queue; None = the thread that issues must write it."""
        if way is Way.ENGINE or (lane.ready(way) and lane.tables.take(wave.tables)):
            return self._program(lane, orders, runs, wave, way, pinned=pinned)
        return None

    def _programs(
        self, lane: Lane, orders: Orders, runs: Sequence[Run], wave: Wave, whole: Way | None, pinned: bool
    ) -> Iterator[Program]:
        """The wave as one program, or as several: one moves while the next is written. On the thread that issues."""
        for some in orders.growing(runs) if whole is None else [runs]:
            way = lane.granted(whole or lane.choice([orders.batches[run.batch] for run in some], orders.waits))
            if way is not Way.ENGINE:
                lane.tables.take_next(wave.tables)
            yield self._program(lane, orders, some, wave, way, pinned=pinned)

    def _program(
        self, lane: Lane, orders: Orders, runs: Sequence[Run], wave: Wave, way: Way, *, pinned: bool
    ) -> Program:
        """Some of a wave as a program: each batch behind its hurdles, each part counted once it has moved.

        In the last tables that the wave has taken, on any thread, once what it waits for has its numbers.
        """
        program, stream = Program(EVERYBODYS), lane.copy
        program.tables = None if way is Way.ENGINE else wave.tables[-1]
        lane.start(program, way)
        passed: set[Flight] = set()
        for batch, parts, place in runs:
            for flight in orders.after[batch]:
                if flight not in passed:
                    lane.wait(program, way, flight)
                    passed.add(flight)
            if orders.behind[batch]:
                lane.hold_until(program, orders.behind[batch], way)
            program.owner, series = place, orders.batches[batch]
            stream = lane.move(program, series, parts, way, place, pinned=pinned)
            program.owner = EVERYBODYS
            if orders.flags[batch] and parts.stop == len(series.shifts):
                program.write(stream, orders.flags[batch])
        if runs[-1].place + len(runs[-1].parts) == len(wave.errors):
            program.record(wave.event.handle, stream)
        lane.finish(program, stream)
        return program

    def _digests(self, lane: Lane, ranges: DigestRanges) -> Digests:
        """Digests of ranges anywhere; those of device memory by way of pinned memory, some rows at a time."""
        self._driver.bind()
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
            pieces = Pieces.plain(source.ravel(), target.ravel(), length.ravel())
            lane.start(program, Way.ENGINE)
            program.copies(Series(pieces), range(1), lane.copy, batched=lane.batched)
            program.record(event.handle, lane.copy)
            self._issue.run(program.table(), self._cuts, errors, 0)
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
        return self._read_back[0]


def torch_stream() -> int:
    """The handle of torch's current stream on this thread."""
    handle, device = _of_torch()
    return int(handle(device()))


@cache
def _of_torch() -> tuple[Callable[[int], int], Callable[[], int]]:
    """A device's current stream, and the current device: what torch.cuda wraps, several microseconds a layer."""
    import torch

    return torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
