"""What every mover must do, as a test class: subclass it, give it a backend, and pytest runs the laws.

A device overrides `memory` (how bytes are written and read) and, where its writes are not the host's, `slow_write`.
"""

# ruff: noqa: D102  a law's name says what it holds

import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layercast.errors import BadTransition, DeadlineExceeded, Missing, Refused
from layercast.move.base import Flight, Mover
from layercast.move.flights import HostFlight, landed
from layercast.plan.pieces import DigestRanges, Pieces
from layercast.testing.memory import SOON_S, HostMemory, Kept

BRIEF_S = 0.05
"""How long a law watches that something does not happen."""
_PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def pieces_of(*rows: Sequence[int]) -> Pieces:
    """Pieces from rows of (source, target, length[, count, source stride, target stride])."""
    full = [[*row, *(1, 0, 0)[len(row) - 3 :]] for row in rows]
    table = np.array(full, np.int64).reshape(-1, 6)
    return Pieces(np.ascontiguousarray(table.T))


@st.composite
def _layouts(draw: st.DrawFn) -> list[tuple[int, int, int, int, int, int]]:
    """Runs as (source gap, target gap, length, count, source pad, target pad); laid out one behind another."""
    gap = st.integers(0, 40)
    length = st.one_of(st.integers(0, 70), st.sampled_from([4096, 16384, 20000]))
    return draw(
        st.lists(
            st.tuples(gap, gap, length, st.one_of(st.just(1), st.integers(0, 9)), gap, gap), min_size=1, max_size=20
        )
    )


class MoverLaws:
    """Laws of `move.base.Mover`."""

    def make_mover(self) -> Mover:
        """A new mover; the laws close it."""
        raise NotImplementedError

    @pytest.fixture
    def memory(self) -> HostMemory:
        """Where the pieces of the laws lie."""
        return HostMemory()

    def slow_write(self, mover: Mover, memory: HostMemory, address: int, data: bytes) -> Flight:
        """Write `data` there in parts, while the caller goes on; the flight lands once all of it is there."""
        flight = HostFlight()

        def write() -> None:
            step = -(-len(data) // 4)
            for first in range(0, len(data), step):
                memory.write(address + first, data[first : first + step])
                os.sched_yield()
            flight.land()

        threading.Thread(target=write, name="laws-writer").start()
        return flight

    @pytest.fixture
    def mover(self) -> Iterator[Mover]:
        """The mover under test, closed afterwards; its threads must be gone then."""
        before = set(threading.enumerate())
        mover = self.make_mover()
        yield mover
        mover.close(SOON_S)
        assert set(threading.enumerate()) <= before

    def test_every_byte_of_a_batch_is_in_place_once_it_has_landed(self, mover: Mover, memory: HostMemory) -> None:
        data = os.urandom(1 << 16)
        source, target = memory.alloc(len(data)), memory.alloc(len(data))
        memory.write(source, data)
        flight = mover.submit(pieces_of((source, target, len(data))))
        flight.wait(SOON_S)
        assert flight.done
        assert flight.error is None
        assert memory.read(target, len(data)) == data

    @_PROPERTY
    @given(layout=_layouts())
    def test_any_mix_of_pieces_and_runs_moves_those_bytes_and_no_other(
        self, mover: Mover, memory: HostMemory, layout: list[tuple[int, int, int, int, int, int]]
    ) -> None:
        rows, at, to = [], 0, 0
        for source_gap, target_gap, length, count, source_pad, target_pad in layout:
            steps = (length + source_pad, length + target_pad) if count != 1 else (0, 0)
            rows.append((at + source_gap, to + target_gap, length, count, *steps))
            at += source_gap + count * (length + source_pad)
            to += target_gap + count * (length + target_pad)
        data, expected = os.urandom(at), bytearray(to)
        for from_, into, length, count, source_step, target_step in rows:
            for row in range(count):
                first, second = from_ + row * source_step, into + row * target_step
                expected[second : second + length] = data[first : first + length]
        source, target = memory.alloc(max(at, 1)), memory.alloc(max(to, 1))
        memory.write(source, data)
        mover.submit(pieces_of(*((source + row[0], target + row[1], *row[2:]) for row in rows))).wait(SOON_S)
        assert memory.read(target, to) == bytes(expected)

    def test_planes_interleaved_in_one_buffer_move_right(self, mover: Mover, memory: HostMemory) -> None:
        block = 96
        data = os.urandom(64 * block)
        base = memory.alloc(len(data))
        memory.write(base, data)
        mover.submit(pieces_of((base, base + block, block, 32, 2 * block, 2 * block))).wait(SOON_S)
        rows = [data[2 * row * block : (2 * row + 1) * block] for row in range(32)]
        assert memory.read(base, len(data)) == b"".join(row + row for row in rows)

    def test_no_pieces_land_too(self, mover: Mover) -> None:
        mover.submit(pieces_of()).wait(SOON_S)

    def test_batches_copy_in_the_order_they_are_submitted(self, mover: Mover, memory: HostMemory) -> None:
        size, hops = 4096, 50
        cells = [memory.alloc(size) for _ in range(hops + 1)]
        data = os.urandom(size)
        memory.write(cells[0], data)
        flights = [mover.submit(pieces_of((cells[i], cells[i + 1], size))) for i in range(hops)]
        flights[-1].wait(SOON_S)
        assert memory.read(cells[-1], size) == data
        assert all(flight.done for flight in flights)

    def test_a_batch_waits_for_its_after(self, mover: Mover, memory: HostMemory) -> None:
        source, target = memory.alloc(64), memory.alloc(64)
        first, second = HostFlight(), HostFlight()
        flight = mover.submit(pieces_of((source, target, 64)), after=[first, landed(), second])
        memory.write(source, b"1" * 64)
        first.land()
        with pytest.raises(DeadlineExceeded):
            flight.wait(BRIEF_S)
        assert memory.read(target, 64) == bytes(64)
        memory.write(source, b"2" * 64)
        second.land()
        flight.wait(SOON_S)
        assert memory.read(target, 64) == b"2" * 64

    def test_a_batch_that_waits_delays_no_other(self, mover: Mover, memory: HostMemory) -> None:
        source, target = memory.alloc(64), memory.alloc(64)
        arrival = HostFlight()
        parked = mover.submit(pieces_of((source, target, 64)), after=[arrival])
        behind = mover.submit(pieces_of((source, target, 64)), after=[parked])
        mover.submit(pieces_of((source, target, 64))).wait(SOON_S)
        assert not parked.done
        arrival.land()
        behind.wait(SOON_S)
        assert parked.done

    def test_a_batch_behind_a_failed_flight_fails_with_its_error_and_copies_nothing(
        self, mover: Mover, memory: HostMemory
    ) -> None:
        source, target = memory.alloc(64), memory.alloc(64)
        memory.write(source, b"x" * 64)
        early, late, error = HostFlight(), HostFlight(), Missing("gone")
        early.fail(error)
        batches = [mover.submit(pieces_of((source, target, 64)), after=[other]) for other in (early, late)]
        batches.append(mover.submit(pieces_of((source, target, 64)), after=[batches[0], batches[1]]))
        late.fail(error)
        for batch in batches:
            with pytest.raises(Missing) as caught:
                batch.wait(SOON_S)
            assert caught.value is error
            assert batch.error is error
        assert memory.read(target, 64) == bytes(64)
        mover.submit(pieces_of((source, target, 64))).wait(SOON_S)
        assert memory.read(target, 64) == b"x" * 64

    def test_a_callback_runs_once_and_its_exception_stops_nothing(self, mover: Mover) -> None:
        arrival, seen, called = HostFlight(), [], threading.Event()

        def explode(_flight: Flight) -> None:
            seen.append("explode")
            raise ValueError("a callback's own mistake")

        flight = mover.submit(pieces_of(), after=[arrival])
        flight.then(explode)
        flight.then(lambda ended: seen.append("second"))
        flight.then(lambda ended: called.set())
        arrival.land()
        assert called.wait(SOON_S)
        flight.wait(SOON_S)
        mover.submit(pieces_of()).wait(SOON_S)
        flight.then(lambda ended: seen.append("at once"))
        assert seen == ["explode", "second", "at once"]

    def test_what_is_kept_lives_until_the_flight_has_landed_and_no_longer(self, mover: Mover) -> None:
        arrival, kept = HostFlight(), Kept()
        gone = kept.gone
        flight = mover.submit(pieces_of(), after=[arrival], keep=[kept])
        del kept
        assert not gone.wait(BRIEF_S)
        arrival.land()
        flight.wait(SOON_S)
        assert gone.wait(SOON_S)

    @_PROPERTY
    @given(
        lengths=st.lists(st.integers(0, 300), max_size=5),
        rows=st.integers(0, 6),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_digests_are_xxh3_of_the_joined_ranges(
        self, mover: Mover, memory: HostMemory, lengths: list[int], rows: int, seed: int
    ) -> None:
        choose = np.random.default_rng(seed)
        data = choose.bytes(4096)
        base = memory.alloc(len(data))
        memory.write(base, data)
        offsets = choose.integers(0, 4096 - 300, (rows, len(lengths)))
        flight = mover.digest(DigestRanges(base + offsets, np.array(lengths, np.int64)))
        flight.wait(SOON_S)
        expected = [
            xxhash.xxh3_64_intdigest(b"".join(data[o : o + n] for o, n in zip(row, lengths, strict=True)))
            for row in offsets.tolist()
        ]
        assert flight.digests.dtype == np.uint64
        assert flight.digests.tolist() == expected

    def test_a_digest_after_a_copy_sees_what_it_copied(self, mover: Mover, memory: HostMemory) -> None:
        data = os.urandom(4096)
        source, target = memory.alloc(4096), memory.alloc(4096)
        memory.write(source, data)
        arrival = HostFlight()
        copied = mover.submit(pieces_of((source, target, 4096)), after=[arrival])
        flight = mover.digest(DigestRanges(np.array([[target]]), np.array([4096])), after=[copied])
        arrival.land()
        flight.wait(SOON_S)
        assert flight.digests.tolist() == [xxhash.xxh3_64_intdigest(data)]

    def test_a_digest_behind_a_failed_flight_has_no_digests(self, mover: Mover, memory: HostMemory) -> None:
        lost = HostFlight()
        lost.fail(Missing("gone"))
        flight = mover.digest(DigestRanges(np.array([[memory.alloc(8)]]), np.array([8])), after=[lost])
        with pytest.raises(Missing):
            flight.wait(SOON_S)
        with pytest.raises(BadTransition):
            _ = flight.digests

    def test_a_mark_lands(self, mover: Mover) -> None:
        mover.mark().wait(SOON_S)

    def test_a_slow_writer_never_leaves_a_torn_block(self, mover: Mover, memory: HostMemory) -> None:
        size = 8192
        source, target = memory.alloc(size), memory.alloc(size)
        for round_ in range(1000):
            data = round_.to_bytes(4, "little") * (size // 4)
            written = self.slow_write(mover, memory, source, data)
            mover.submit(pieces_of((source, target, size)), after=[written]).wait(SOON_S)
            assert memory.read(target, size) == data, f"torn in round {round_}"

    def test_what_is_done_aside_tells_how_it_went_and_raises_at_nobody(self, mover: Mover) -> None:
        told: list[BaseException | None] = []
        over = [threading.Event(), threading.Event()]

        def heard(error: BaseException | None) -> None:
            told.append(error)
            over[len(told) - 1].set()

        def mistaken() -> None:
            raise ArithmeticError("a mistake")

        mover.aside(mistaken, heard)
        assert over[0].wait(SOON_S)
        mover.aside(lambda: None, heard)
        assert over[1].wait(SOON_S)
        assert isinstance(told[0], ArithmeticError)
        assert told[1] is None

    def test_closing_finishes_what_was_submitted(self, memory: HostMemory) -> None:
        mover = self.make_mover()
        data = os.urandom(1 << 20)
        source, target = memory.alloc(len(data)), memory.alloc(len(data))
        memory.write(source, data)
        flights = [mover.submit(pieces_of((source, target, len(data)))) for _ in range(10)]
        mover.close(SOON_S)
        assert all(flight.done and flight.error is None for flight in flights)
        assert memory.read(target, len(data)) == data
        with pytest.raises(Refused):
            mover.submit(pieces_of())

    def test_closing_twice_changes_nothing(self) -> None:
        mover = self.make_mover()
        mover.close(SOON_S)
        mover.close(SOON_S)

    def test_closing_gives_up_what_waits_for_others_by_its_deadline(self, memory: HostMemory) -> None:
        before = set(threading.enumerate())
        mover = self.make_mover()
        arrival = HostFlight()
        target = memory.alloc(8)
        flight = mover.submit(pieces_of((memory.alloc(8), target, 8)), after=[arrival])
        with pytest.raises(DeadlineExceeded):
            mover.close(BRIEF_S)
        assert isinstance(flight.error, DeadlineExceeded)
        arrival.land()
        mover.close(SOON_S)
        assert set(threading.enumerate()) <= before
