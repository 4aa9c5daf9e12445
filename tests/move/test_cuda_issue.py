import ctypes
from dataclasses import replace

import numpy as np
import pytest
from host_device import HostDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import LOOPS, loop_of

from layercast.move.cuda_copies import CALL_BYTES, MOST
from layercast.move.cuda_pace import ASIDE, BEFORE, HANDED, HURRIED, HURRIED_AHEAD, NAPS, PACE_WORDS, RARER, keep
from layercast.move.cuda_program import EVERYBODYS, Program
from layercast.move.cuda_relay import Relay
from layercast.move.cuda_rows import BELL, PACE, QUEUED_AT, TALLY_BYTES
from layercast.move.kernels.pieces import PARAMETERS
from layercast.plan.pieces import Series
from layercast.testing.move_laws import pieces_of

AHEAD = 4
TURNS = Relay((3, 4), 5, (1, 2))


class Copies(HostDevice):
    """Notes every copy instead of doing it."""

    def __init__(self):
        super().__init__()
        self.copies, self.calls_of = [], []

    def _copy_batch(self, to, from_, nbytes, count, *rest):
        self.calls_of.append(count)
        return super()._copy_batch(to, from_, nbytes, count, *rest)

    def _move(self, rows):
        self.copies += [(from_, to, nbytes) for to, from_, nbytes in rows]


@pytest.fixture(scope="module", params=LOOPS)
def device(request):
    device = Copies()
    device.issue = loop_of(request.param)(device.calls, (0, 0))
    return device


def copied(device, pieces, cuts=(), *, batched=True):
    device.copies.clear()
    device.calls_of.clear()
    program, errors = Program(), np.zeros(1, np.int64)
    program.copies(Series(pieces), range(1), 1, batched=batched)
    device.issue.run(program.table(), np.array(sorted(cuts), np.int64), errors, 0)
    assert not errors.any()
    return device.copies


@settings(deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 200),
            st.integers(0, 200),
            st.integers(0, 90),
            st.integers(0, 3),
            st.integers(-9, 9),
            st.integers(-9, 9),
        ),
        max_size=6,
    ),
    cuts=st.sets(st.integers(0, 300), max_size=6),
    batched=st.booleans(),
)
def test_copies_are_the_runs_row_by_row_and_cross_no_cut(device, rows, cuts, batched):
    got = copied(device, pieces_of(*rows), cuts, batched=batched)
    wanted = [
        (source + row * down + i, target + row * up + i)
        for source, target, length, count, down, up in rows
        for row in range(count)
        for i in range(length)
    ]
    assert [(a + i, b + i) for a, b, n in got for i in range(n)] == wanted
    assert all(n > 0 and not any(a < c < a + n or b < c < b + n for c in cuts) for a, b, n in got)


@settings(deadline=None)
@given(
    lengths=st.lists(
        st.one_of(st.integers(1, 4096), st.integers(1, 3 * CALL_BYTES)), min_size=1, max_size=3 * MOST, unique=False
    )
)
def test_a_call_of_the_driver_holds_no_more_than_a_launch_may_wait_for(device, lengths):
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    got = copied(device, pieces_of(*((at, at, n) for at, n in zip(starts, lengths, strict=True))))
    assert [(a, n) for a, _, n in merged(got)] == [(0, sum(lengths))]
    copies = iter(got)
    for count in device.calls_of:
        assert count <= MOST
        assert sum(next(copies)[2] for _ in range(count)) <= CALL_BYTES


@pytest.mark.parametrize("parts", [1, 40])
def test_a_programs_first_call_is_short_and_the_next_ones_grow(device, parts):
    """A device begins with a call once all of it is written."""
    device.calls_of.clear()
    program, errors, count = Program(), np.zeros(parts, np.int64), 512 // parts
    pieces = pieces_of(*((2 * at, 2 * at, 1) for at in range(count)))
    program.copies(Series(pieces, np.zeros((parts, 2), np.int64)), range(parts), 1, batched=True)
    device.issue.run(program.table(), np.zeros(0, np.int64), errors, 0)
    grown = [8, 16, 32, 64, 128, 128, 128, 8] if parts == 1 else [8, 4, *[12] * 39]
    assert device.calls_of == grown


def merged(copies):
    """Neighbours made one."""
    out = []
    for from_, to, nbytes in copies:
        if out and out[-1][0] + out[-1][2] == from_ and out[-1][1] + out[-1][2] == to:
            out[-1] = out[-1][0], out[-1][1], out[-1][2] + nbytes
        else:
            out.append((from_, to, nbytes))
    return out


class Napping(Copies):
    """Has its own say in what comes of a nap (`_rest`) of whoever hands over, by the loop of that name."""

    def __init__(self, loop):
        super().__init__()
        self._nap = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(self._rest)
        self.calls = replace(self.calls, rest=self._nap)
        self.issue = loop_of(loop)(self.calls, (0, 0))


class Slow(Napping):
    """Counts a call as done only when whoever hands over rests, and then `pace` at a time."""

    def begin(self, a_nap):
        self.a_nap, self.late, self.most, self.naps = a_nap, [], 0, 0
        self.copies.clear()

    def _set(self, word, value):
        self.late.append((word, value))
        self.most = max(self.most, len(self.late))

    def _rest(self, _us):
        self.naps += 1
        for _ in range(min(self.a_nap, len(self.late))):
            word, value = self.late.pop(0)
            word.value = value
        return 0


def pace_of():
    """One that is kept in calls of the greatest size."""
    pace = np.zeros(PACE_WORDS, np.int64)
    keep(pace.view(np.int32)[::2], AHEAD, CALL_BYTES)
    return pace


@pytest.fixture(scope="module", params=LOOPS)
def slow(request):
    return Slow(request.param)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("a_nap", [1, 3])
def test_a_lane_that_keeps_a_pace_has_few_calls_under_way(slow, batched, a_nap):
    device, pace, quarter = slow, pace_of(), CALL_BYTES // 4
    device.begin(a_nap)
    for _ in range(5):  # calls are counted from program to program
        program, errors = Program(pace=pace.ctypes.data), np.zeros(1, np.int64)
        for nth in range(10):
            program.copies(Series(pieces_of((nth * quarter, nth * quarter, quarter))), range(1), 1, batched=batched)
        device.issue.run(program.table(), np.zeros(0, np.int64), errors, 0)
        assert not errors.any()
    assert sum(nbytes for _, _, nbytes in device.copies) == 50 * quarter
    assert device.most == AHEAD
    assert pace[1] == 50 // 4


def test_a_device_that_does_nothing_for_long_is_handed_the_rest_all_the_same():
    device, pace = Slow("plain"), pace_of()
    device.begin(a_nap=0)
    program, errors = Program(pace=pace.ctypes.data), np.zeros(1, np.int64)
    program.copies(Series(pieces_of((0, 0, (AHEAD + 1) * CALL_BYTES))), range(1), 1, batched=True)
    device.issue.run(program.table(), np.zeros(0, np.int64), errors, 0)
    assert not errors.any()
    assert sum(nbytes for _, _, nbytes in device.copies) == (AHEAD + 1) * CALL_BYTES
    assert device.naps == 2 * NAPS


def test_what_is_hurried_keeps_no_pace_and_what_comes_behind_it_does(slow):
    """A forward waits until the device has been handed it. Here a device counts only while it is waited for."""
    device, tally, calls = slow, np.zeros(TALLY_BYTES // 8, np.int64), HURRIED_AHEAD // 3
    device.begin(a_nap=1)
    tally[BELL // 8] = -1
    pace, one = tally[PACE // 8 :], Series(pieces_of((0, 0, RARER * calls * CALL_BYTES)))
    for first in (1, 0xFFFFFFFE):
        tally[PACE // 8 :] = device.naps = 0
        device.late.clear()
        keep(pace.view(np.int32)[::2], AHEAD, CALL_BYTES)
        pace[HANDED], pace[HURRIED] = first - 1, (first + 2) & 0xFFFFFFFF
        errors, naps = np.zeros(6, np.int64), []
        for nth in range(6):
            program = Program(nth, pace=pace.ctypes.data)
            program.copies(one, range(1), 1, batched=True, tally=tally.ctypes.data, number=nth)
            device.issue.run(program.table(), np.zeros(0, np.int64), errors, first)
            naps.append(device.naps)
        assert not errors.any()
        assert naps[2] == 0
        assert np.diff(naps[2:]).min() >= RARER * calls - AHEAD


class Busy(Napping):
    """Has another lane in which batches come to their end as whoever hands over naps."""

    def __init__(self, loop):
        super().__init__(loop)
        self.first, self.tally = (np.zeros(TALLY_BYTES // 8, np.int64) for _ in range(2))
        self.tally[BELL // 8] = -1
        self.pace = self.tally[PACE // 8 :]

    def begin(self, queued, naps, batches=2, hurried=0, more=0):
        """There are so many batches up to `queued`, and one of them ends every so many naps; 0 = none does.

        more: so many are queued there whenever this lane hands something over.
        """
        self.every, self.more, self.naps, self.seen = naps, more, 0, []
        self.first[0], self.first[QUEUED_AT // 8] = (queued - batches) & 0xFFFFFFFF, queued
        self.copies.clear()
        self.pace[:] = self.tally[0] = 0
        keep(self.pace.view(np.int32)[::2], AHEAD, CALL_BYTES)
        self.pace[BEFORE], self.pace[HURRIED] = self.first.ctypes.data, hurried

    def hand_over(self, calls):
        """Each a part of a series."""
        program, errors = Program(pace=self.pace.ctypes.data), np.zeros(calls, np.int64)
        series = Series(pieces_of((0, 0, CALL_BYTES)), np.zeros((calls, 2), np.int64), range(calls))
        program.copies(series, range(calls), 1, batched=True, tally=self.tally.ctypes.data, number=1)
        self.issue.run(program.table(), np.zeros(0, np.int64), errors, 0)
        assert not errors.any()
        assert (len(self.copies), self.tally[0]) == (calls, calls)
        return self.naps

    def _rest(self, _us):
        self.seen.append((len(self.copies), int(self.tally[0])))
        self.naps += 1
        if self.every and self.naps % self.every == 0 and self.first[0] != self.first[QUEUED_AT // 8]:
            self.first[0] = (self.first[0] + 1) & 0xFFFFFFFF
        return 0

    def _copy_batch(self, *given):
        self.first[QUEUED_AT // 8] += self.more
        return super()._copy_batch(*given)


@pytest.fixture(scope="module", params=LOOPS)
def busy(request):
    return Busy(request.param)


def test_the_background_stands_aside_as_long_as_anything_moves_in_the_lane_that_goes_first(busy):
    """But not where that waits for something, the background perhaps, nor where a forward waits for the background."""
    never = 0
    for queued in (2, 0xFFFFFFFF, 1):
        for every, batches, hurried, naps in (
            (7, 2, 0, 14),
            (ASIDE - 1, 3, 0, 3 * (ASIDE - 1)),
            (never, 2, 0, ASIDE),
            (ASIDE + 1, 2, 0, ASIDE),
            (7, 2, 3, 0),
            (7, 0, 0, 0),
        ):
            busy.begin(queued, every, batches, hurried)
            assert busy.hand_over(3) == naps


def test_the_background_stands_aside_again_once_more_is_queued_in_the_lane_that_goes_first(busy):
    busy.begin(2, naps=0)
    assert busy.hand_over(2) == ASIDE
    busy.first[QUEUED_AT // 8] += 1
    busy.copies.clear()
    assert busy.hand_over(2) == 2 * ASIDE


def test_all_that_the_background_has_handed_over_is_counted_while_it_stands_aside(busy):
    """Else a load that has landed is not known to have until what goes first has, too."""
    busy.begin(2, naps=5, batches=1, more=1)
    busy.hand_over(3)
    assert busy.seen == [(nth, nth) for nth in range(3) for _ in range(5)]


def test_a_loop_is_compiled_once_for_the_same_calls_and_cuts_no_piece_that_may_be_as_long():
    compiled, device = loop_of("compiled"), Copies()
    device.issue = compiled(device.calls, (0, 0), 4 * CALL_BYTES)
    assert compiled(device.calls, (0, 0), 4 * CALL_BYTES) is device.issue
    assert compiled(Copies().calls, (0, 0), 4 * CALL_BYTES) is not device.issue
    row = (0, 1 << 40, 3 * CALL_BYTES)
    assert copied(device, pieces_of(row)) == [row]
    assert device.calls_of == [1]
    cut = copied(device, pieces_of(row), cuts=[CALL_BYTES])
    assert [nbytes for _, _, nbytes in cut] == [CALL_BYTES, 2 * CALL_BYTES]


class Launching(HostDevice):
    """Notes each launch by its parameters, and refuses those whose first one says so."""

    def __init__(self):
        super().__init__()
        self.refused, self.seen = {}, []
        self._launching = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 11)(self._launched)
        self.calls = replace(self.calls, launch=self._launching)

    def _launched(self, *given):
        pointers = np.ctypeslib.as_array((ctypes.c_int64 * PARAMETERS).from_address(given[9]))
        values = [ctypes.c_int64.from_address(at).value for at in pointers.tolist()]
        self.seen.append(("launch", *given[:9], *values))
        return self.refused.get(values[0], 0)

    def _write(self, stream, address, value, flags):
        self.seen.append(("count", value, stream))
        return super()._write(stream, address, value, flags)

    def _record(self, event, stream):
        self.seen.append(("record", event, stream))
        return stream, lambda: None

    def _wait(self, stream, event, flags):
        self.seen.append(("wait", stream, event))
        return stream, lambda: None

    def _sleep(self, event):
        self.seen.append(("sleep", event))
        return 0, lambda: None

    def _finish(self, stream):
        self.seen.append(("finish", stream))
        return 0, lambda: None


@pytest.fixture(scope="module", params=LOOPS)
def launching(request):
    device = Launching()
    device.issue = loop_of(request.param)(device.calls, (0, 0))
    return device


CODES = st.dictionaries(st.integers(0, 11), st.integers(1, 999), max_size=4)


@settings(deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=3),
    failed=CODES,
    refused=CODES,
    mute=st.booleans(),
)
def test_each_of_a_run_of_launches_is_counted_behind_it_and_none_that_fails_keeps_others(
    launching, runs, failed, refused, mute
):
    program, errors, wanted = Program(), np.zeros(12, np.int64), []
    errors[[*failed]] = [*failed.values()]
    left, tally = errors.copy(), np.zeros(TALLY_BYTES // 8, np.int64)
    tally[BELL // 8] = -1
    for count, counted in runs:
        values = np.arange(count * PARAMETERS).reshape(count, PARAMETERS) + 1000
        values[:, 0] = owners = range(program.owner, program.owner + count)
        at = tally.ctypes.data if counted else 0
        program.launches((77, 5, 256, 64), TURNS.address, program.hold(values), count, at, program.owner)
        for owner, row in zip(owners, values.tolist(), strict=True):
            if not left[owner]:
                wanted.append(("launch", 77, 5, 1, 1, 256, 1, 1, 64, 3 + owner % 2, *row))
                left[owner] = refused.get(owner, 0)
            if counted and mute:
                left[left == 0] = 7
            elif counted:
                wanted.append(("count", 100 + owner, 5))
        program.owner += count
    launching.refused, launching.failing = refused, {"write": 7} if mute else {}
    launching.seen.clear()
    launching.issue.run(program.table(), np.zeros(0, np.int64), errors, 100)
    assert [row for row in launching.seen if row[0] in ("launch", "count")] == wanted
    assert errors.tolist() == left.tolist()


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 5), max_size=3), failed=CODES, refused=CODES)
def test_launches_of_a_relay_take_turns_and_each_is_counted_behind_it_and_all_before_it(
    launching, counts, failed, refused
):
    program, errors, wanted, tally = Program(), np.zeros(15, np.int64), [], np.zeros(TALLY_BYTES // 8, np.int64)
    errors[[*failed]] = [*failed.values()]
    tally[BELL // 8] = -1
    for count in counts:
        values = np.zeros((count, PARAMETERS), np.int64)
        values[:, 0] = owners = range(program.owner, program.owner + count)
        program.launches((77, 5, 256, 64), TURNS.address, program.hold(values), count, tally.ctypes.data, program.owner)
        for owner in owners:
            stream, event = (3, 1) if owner % 2 == 0 else (4, 2)
            if owner not in failed:
                wanted.append(("launch", stream))
                if owner not in refused:
                    wanted += [("record", event, stream), ("wait", 5, event)]
            wanted.append(("count", 100 + owner, 5))
        program.owner += count
    launching.refused, launching.failing = refused, {}
    launching.seen.clear()
    launching.issue.run(program.table(), np.zeros(0, np.int64), errors, 100)
    assert [(row[0], row[9]) if row[0] == "launch" else row for row in launching.seen] == wanted


@pytest.mark.parametrize("call", ["record", "wait"])
def test_a_launch_that_cannot_be_waited_for_has_failed(launching, call):
    program, errors = Program(), np.zeros(2, np.int64)
    program.launches((77, 1, 1, 0), TURNS.address, program.hold(np.zeros((2, PARAMETERS), np.int64)), 2)
    launching.refused, launching.failing = {}, {call: 9}
    launching.issue.run(program.table(), np.zeros(0, np.int64), errors, 0)
    launching.failing = {}
    assert errors.tolist() == [9, 9]


@pytest.mark.parametrize("call", ["record", "wait"])
def test_a_launch_behind_which_no_stream_can_be_put_is_over_before_it_is_counted(launching, call):
    program, errors, tally = Program(), np.zeros(2, np.int64), np.zeros(TALLY_BYTES // 8, np.int64)
    tally[BELL // 8] = -1
    values = program.hold(np.zeros((2, PARAMETERS), np.int64))
    program.launches((77, 1, 1, 0), TURNS.address, values, 2, tally.ctypes.data)
    launching.refused, launching.failing = {}, {call: 9}
    launching.seen.clear()
    launching.issue.run(program.table(), np.zeros(0, np.int64), errors, 100)
    launching.failing = {}
    over = {"record": [("finish", 3), ("finish", 4)], "wait": [("sleep", 1), ("sleep", 2)]}[call]
    seen = [row[:2] for row in launching.seen if row[0] in ("launch", over[0][0], "count")]
    assert seen == [("launch", 77), over[0], ("count", 100), ("launch", 77), over[1], ("count", 101)]


def test_a_launch_that_is_everybodys_is_never_skipped_and_its_failure_is_everybodys(launching):
    program, errors = Program(EVERYBODYS), np.array([3, 0], np.int64)
    program.launches((77, 1, 1, 0), TURNS.address, program.hold(np.zeros((2, PARAMETERS), np.int64)), 2)
    launching.refused, launching.failing = {0: 5}, {}
    launching.seen.clear()
    launching.issue.run(program.table(), np.zeros(0, np.int64), errors, 0)
    assert [row[0] for row in launching.seen].count("launch") == 2
    assert errors.tolist() == [3, 5]
