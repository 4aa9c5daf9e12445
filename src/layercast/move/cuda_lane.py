"""One direction of a device: its streams, its staging memory, and the programs that move rows over them.

Copies of one lane happen in the order in which their programs are issued. Does not know flights, gates or layers.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from layercast.errors import OutOfMemory
from layercast.move.base import Flight, Waits
from layercast.move.costs import DEFAULT_COSTS, Costs, Direction, Way
from layercast.move.cuda_driver import BESIDE_SINCE, Batched, Driver
from layercast.move.cuda_flights import CudaFlight, Mark, Tally
from layercast.move.cuda_program import EVERYBODYS, LAUNCH_BYTES, Program
from layercast.move.cuda_relay import Relay
from layercast.move.cuda_rows import TALLY_BYTES
from layercast.move.cuda_stage import SLOTS, Slots
from layercast.move.cuda_tables import TABLE_BYTES, TABLES, Parts, Pool, Tables
from layercast.move.cuda_ways import surely_engine, way_of
from layercast.move.kernels.pieces import PieceKernel
from layercast.plan.pieces import Pieces, Series

_log = logging.getLogger("layercast")

SAMPLE = 2048
"""Pieces whose places are looked at to choose a way, those of 32,768 tokens: fewer would make memory that lies together
look scattered."""
BACKGROUND_SHARE = 3
"""How much less staging memory there is for what goes in the background."""
STAGED_GRID = 132
GRID = {Direction.UP: 32, Direction.DOWN: 32, Direction.LOCAL: 64, Direction.PEER: 66}
"""Programs of the copy kernel: enough for a link, few enough to leave the rest of the device to the model. Over NVLink
half as many as an H100 has cores: 64 reach 0.9 of what these do, and take the cores for longer. What is staged takes
them all: it ends the sooner, beside matrix products at twice the rate of 32 for the same cost to these."""
PACES = {Direction.UP: (3, 16 << 20), Direction.DOWN: (2, 16 << 20)}
"""Marks ahead, at most, and bytes from mark to mark (see `cuda_pace`): as little under way as keeps a link busy while
a thread writes the next program, 1 ms; from the device, where nobody waits for the next, 0.6 ms. A mark costs 4 us."""
_NO_PIECES = Pieces.join([])


@dataclass(slots=True)
class Staging:
    """What a lane has taken of device and pinned memory. slot_bytes: of each slot, taken or not; 0 = none will be."""

    slot_bytes: int = 0
    slots: Slots | None = None
    blocks: list[tuple[str, int]] = field(default_factory=list)
    nbytes: int = 0


class Lane:
    """Streams and staging of one direction. Used by one thread, which has bound the driver.

    But any thread may write a program once slots are there, if it is staged: it takes nothing of the lane that changes
    but tables that are its own. before: the lane for whose copies this one's stand aside.
    """

    def __init__(
        self,
        driver: Driver,
        direction: Direction,
        kernel: PieceKernel | None,
        staging_limit: int,
        before: "Lane | None" = None,
    ) -> None:
        self.driver = driver
        self.direction = direction
        self.costs: Costs = before.costs if before is not None else DEFAULT_COSTS[direction]
        self.kernel = kernel
        self.copy, spread = driver.stream(urgent=True), driver.stream(urgent=True)
        share = 1 if before is None else BACKGROUND_SHARE
        self.staging = Staging(staging_limit // SLOTS // share // 256 * 256)
        first = before.tally.address if before is not None else 0
        self.tally: Tally = Tally(driver.host_memory(TALLY_BYTES), driver.calls.ring, PACES.get(direction), first)
        self._tail, self._filled = driver.event(), driver.event()
        self._relay = Relay((self.copy, spread), driver.stream(urgent=True), (driver.event(), driver.event()))
        self.tables = Pool(self._take_tables() if kernel is not None else [], self.tally.reached, driver.sleep_until)
        """For the kernel's programs. Without any there is no kernel."""
        if not self.tables or direction not in (Direction.UP, Direction.DOWN):
            self.staging.slot_bytes = 0

    def close(self) -> None:
        """Give everything back; nothing may be in flight."""
        for stream in self._relay.streams:
            self.driver.drop_stream(stream)
        staging, self.staging = self.staging, Staging()
        for tables in self.tables.close(0.0):
            self.driver.drop_event(tables.free)
        for event in [self._tail, self._filled, *self._relay.events, *(staging.slots.events if staging.slots else [])]:
            self.driver.drop_event(event)
        self.tally.close()
        self.driver.drop_host_memory(self.tally.address)
        for kind, address in staging.blocks:
            (self.driver.drop_host_memory if kind == "host" else self.driver.drop_device_memory)(address)

    @cached_property
    def batched(self) -> Batched:
        """How copies of pinned memory, or of none of the host's, are handed over."""
        if not self.driver.batches:
            return Batched.NO
        inside = self.direction is Direction.LOCAL
        return Batched.FAST if inside or self.driver.version < BESIDE_SINCE else Batched.BESIDE

    def choice(self, batches: Sequence[Series], waits: Waits) -> Way:
        """How these are to move; the first pieces of the first that has any stand for all."""
        kernel = self.kernel if self.tables else None
        idle = self.direction is Direction.UP and waits is Waits.IDLE
        first_of = next((batch for batch in batches if len(batch.pieces)), None)
        if kernel is None or first_of is None:
            return Way.ENGINE
        look, first = kernel.scribe.look, first_of.pieces.table
        nbytes, copies, longest, fine = look(first, first_of.shifts)
        size, seen = (nbytes, copies), {id(first)}
        if surely_engine(size, self.costs, idle=idle):
            return Way.ENGINE
        for batch in batches:
            if batch is not first_of:
                table = batch.pieces.table
                _, count, most, multiples = look(_NO_PIECES.table if id(table) in seen else table, batch.shifts)
                fine, copies, longest = fine and multiples, copies + count, max(longest, most)
                seen.add(id(table))
        # A table has at most one slot's bytes, so padding adds a column a slot; twice the rows is more than enough.
        if not fine or 24 * 2 * (copies + 2 * len(seen)) > TABLE_BYTES:
            return Way.ENGINE
        runs = 0
        if longest <= self.staging.slot_bytes:
            sample = first[:, :SAMPLE]
            runs = kernel.scribe.runs(sample, self.direction is Direction.UP)
            if sample.shape != first.shape:
                size = look(sample, first_of.shifts)[:2]
        return way_of(size, self.costs, kernel=True, runs=runs, idle=idle)

    def granted(self, way: Way) -> Way:
        """This way, or the engine's where there is no memory to stage in. On the thread that issues."""
        if not self.ready(way):
            self._take_slots(self.staging.slot_bytes)
        return way if self.ready(way) else Way.ENGINE

    def ready(self, way: Way) -> bool:
        """Whether there is what this way needs, or only the thread that issues may take it."""
        return way is not Way.STAGED or self.staging.slots is not None

    def start(self, program: Program, way: Way) -> None:
        """The first rows of a program: behind all that this lane did before, and its tables where it has any.

        Of what is staged only the second half waits: the first one fills slots, which say themselves when they are
        free.
        """
        first, *others = self._streams(way)
        program.wait(first if self._scatters(way) else self._last(way), self._tail)
        if program.tables is not None:
            program.copies_of(*program.tables.upload, first, batched=Batched.NO)
            if others:  # what counts waits too, lest it run ahead of what isn't launched
                self._hand_over(program, first, *others)
        program.pace = self.tally.pace  # the upload keeps none, as marks ascend on one stream alone

    def wait(self, program: Program, way: Way, flight: Flight) -> None:
        """What moves next waits for a flight of another lane, or for the caller's compute."""
        for stream in self._all_of(way):
            if isinstance(flight, Mark):
                program.wait(stream, flight.event.handle)
            elif isinstance(flight, CudaFlight):
                program.hold_until(stream, flight.wave.tally.address, flight.number)

    def hold_until(self, program: Program, address: int, way: Way) -> None:
        """What moves next waits for a word."""
        for stream in self._all_of(way):
            program.hold_until(stream, address)

    def move(
        self,
        program: Program,
        series: Series,
        parts: range,
        way: Way,
        number: int,
        *,
        pinned: bool,
    ) -> int:
        """Add parts of a series and count them as `number` and those after it; the stream behind which they are there.

        pinned: the device reaches both sides.
        """
        tally, tables = self.tally.address, program.tables
        stream = self._last(way)
        if tables is None or not len((moved := self._parts(tables, series.pieces, way)).tables):
            # By the engine; or there are no bytes, and only the counting is left.
            batched = self.batched if pinned else Batched.NO
            program.copies(series, parts, stream, batched=batched, tally=tally, number=number)
        elif way is Way.KERNEL:
            at = self._placed(program, tables, series, moved) + LAUNCH_BYTES * parts.start
            program.launches(self._launched(GRID[self.direction]), self._relay.address, at, len(parts), tally, number)
        else:
            self._stage(program, series, parts, moved, number)
        return stream

    def skip(self, number: int, held: Sequence[Tables]) -> None:
        """Count a batch that will not be moved, so that no stream waits for it for ever.

        held: tables of programs of which it is not known how much the device has been handed.
        """
        for stream in self._relay.streams[1:]:
            self.driver.record(self._tail, stream)
            self._wait_for(self._tail)
        for tables in held:
            self.driver.record(tables.free, self.copy)
        self.driver.stream_writes_value(self.copy, self.tally.address, number)
        self.driver.record(self._tail, self.copy)
        self.tally.passed_over(number)

    def finish(self, program: Program, stream: int) -> None:
        """The last rows of a program."""
        program.owner = EVERYBODYS
        if program.tables is not None:
            program.tables.complete()
            program.record(program.tables.free, stream)
        program.record(self._tail, stream)

    def _stage(self, program: Program, series: Series, chosen: range, parts: Parts, number: int) -> None:
        """Parts of a series by way of slots: long copies between host and slot, a launch between slot and blocks."""
        slots, each, up = self.staging.slots, len(parts.long), self.direction is Direction.UP
        assert slots is not None, "see `ready`"
        first, shifts = number * each % SLOTS, series.shifts[chosen.start : chosen.stop]
        halves = np.empty((2, len(chosen) * each, 2), np.int64)
        self._kernel.scribe.by_slots(halves, shifts, up, first, (slots.base, slots.nbytes, SLOTS))
        moves, launches = halves
        at = program.hold(*self._kernel.values(parts.tables, launches))
        program.stages(self._about(program, slots, parts), moves, at, len(chosen), first, self.tally.address, number)

    def _about(self, program: Program, slots: Slots, parts: Parts) -> int:
        """Where a program says how these are staged (see `cuda_stage.ABOUT`), once for all that are."""
        assert program.tables is not None, "see `move`"
        about = program.tables.about
        if id(parts.long) not in about:
            head = (*self._launched(STAGED_GRID), slots.address, self.batched, len(parts.long))
            words = np.array([self.direction is Direction.UP, *head, *parts.long.ravel().tolist()], np.int64)
            about[id(parts.long)] = program.hold(words)
        return about[id(parts.long)]

    def _launched(self, grid: int) -> tuple[int, int, int, int]:
        """The kernel, as programs launch it."""
        kernel = self._kernel
        return kernel.function, grid, kernel.threads, kernel.shared

    @property
    def _kernel(self) -> PieceKernel:
        """The one that there is, as there are tables."""
        assert self.kernel is not None
        return self.kernel

    def _placed(self, program: Program, tables: Tables, series: Series, parts: Parts) -> int:
        """Where the parameters lie of the launch that moves a series' first part, with those of the others behind."""
        if (at := tables.placed.get(id(series))) is None:
            at = tables.placed[id(series)] = program.hold(*self._kernel.values(parts.tables, series.shifts))
        return at

    def _parts(self, tables: Tables, pieces: Pieces, way: Way) -> Parts:
        """What pieces are, apart from their shift, with a program's tables for all layers; none = no bytes."""
        if (parts := tables.parts.get(id(pieces.table))) is None:
            scribe, up = self._kernel.scribe, self.direction is Direction.UP
            staged = way is Way.STAGED
            parts = tables.cut(pieces, up, self.staging.slot_bytes, scribe) if staged else tables.add(pieces, scribe)
            tables.parts[id(pieces.table)] = parts
        return parts

    def _streams(self, way: Way) -> tuple[int, ...]:
        """The streams that read this way's tables, or that count behind these: the first takes the tables up."""
        if way is Way.STAGED:
            return self._relay.turns[1:]
        return self._relay.streams if way is Way.KERNEL else (self.copy,)

    def _all_of(self, way: Way) -> tuple[int, ...]:
        """The streams that this way uses."""
        return *self._streams(way), *([self.copy] if way is Way.STAGED else [])

    def _scatters(self, way: Way) -> bool:
        """Whether launches come last."""
        return way is Way.KERNEL or (way is Way.STAGED and self.direction is Direction.UP)

    def _last(self, way: Way) -> int:
        """The stream behind which a way's batches are complete, and that counts them."""
        return self._streams(way)[-1] if self._scatters(way) else self.copy

    def _wait_for(self, event: int) -> None:
        """What copies goes on after an event, at once."""
        self.driver.check("cuStreamWaitEvent", self.driver.calls.wait(self.copy, event, 0))

    def _hand_over(self, program: Program, from_: int, *to: int) -> None:
        """What each of `to` gets next goes behind all that `from_` has now."""
        program.record(self._filled, from_)
        for stream in to:
            program.wait(stream, self._filled)

    def _take_tables(self) -> list[Tables]:
        """Tables in memory of their own; none where there is no more."""
        host = self._take("host", TABLES * TABLE_BYTES)
        device = self._take("device", TABLES * TABLE_BYTES) if host else 0
        steps = range(0, TABLES * TABLE_BYTES if device else 0, TABLE_BYTES)
        return [Tables(host + step, device + step, self.driver.event()) for step in steps]

    def _take_slots(self, nbytes: int) -> None:
        """Device memory to stage in, taken with the first that is staged; without it nothing is from now on."""
        base = self._take("device", SLOTS * nbytes)
        self.staging.slot_bytes = nbytes if base else 0
        if base:
            events = [self.driver.event() for _ in range(2 * SLOTS)]
            self.staging.slots = Slots(base, nbytes, self.copy, self._relay.turns[1], events)

    def _take(self, kind: str, nbytes: int) -> int:
        """An address of new memory, or 0 where there is no more."""
        take = self.driver.host_memory if kind == "host" else self.driver.device_memory
        try:
            address = take(nbytes)
        except OutOfMemory as error:
            _log.warning("copies go without staging: %s", error)
            return 0
        self.staging.blocks.append((kind, address))
        self.staging.nbytes += nbytes
        return address
