import ctypes
import dataclasses
import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from async_device import AsyncDevice
from host_device import KERNEL, DeviceMemory, HostDevice
from loops import LOOPS, interpreter_kept, loop_of, spun
from msgspec.structs import replace

from layercast.errors import BrokenInvariant, DeviceFailed, Missing
from layercast.move.base import Waits
from layercast.move.costs import Costs, Direction, Way, only
from layercast.move.cuda import CudaMover
from layercast.move.cuda_desk import Desk
from layercast.move.cuda_driver import ATTRIBUTES_BYTES, BESIDE_SINCE, DEVICE, HOST, libc
from layercast.move.cuda_lane import GRID
from layercast.move.cuda_program import Program
from layercast.move.cuda_stage import SLOTS
from layercast.move.cuda_tables import TABLE_BYTES
from layercast.move.flights import HostFlight
from layercast.move.kernels.pieces_host import compiled_scribe
from layercast.plan.pieces import Series
from layercast.testing.move_laws import BRIEF_S, SOON_S, MoverLaws, pieces_of

NOTHING = np.zeros(0, np.int64)
STAGED, KERNELS = only(Way.STAGED), only(Way.KERNEL)


class OnHostDevice(MoverLaws):
    kernel = None
    costs = {}

    def make_mover(self):
        self.device = HostDevice()
        issue = self.device.issue(self.device.calls, self.device.batch_attributes)
        mover = CudaMover(self.device, self.kernel, issue, lambda: 1, 3 << 16)
        mover.prefer(self.costs)
        return mover

    @pytest.fixture
    def memory(self, mover):
        return DeviceMemory(self.device, (DEVICE,))


class TestByCopyEngine(OnHostDevice): ...


class TestByKernel(OnHostDevice):
    kernel = KERNEL
    costs = KERNELS


@pytest.fixture
def device():
    return HostDevice()


def mover_of(device, costs=STAGED, kernel=KERNEL, staging=SLOTS * 4096):
    mover = CudaMover(device, kernel, device.issue(device.calls, device.batch_attributes), lambda: 1, staging)
    mover.prefer(costs)
    return mover


@pytest.mark.parametrize("costs", [{}, STAGED, KERNELS])
@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST), (DEVICE,), (HOST,)])
@pytest.mark.parametrize("size", [48, 1024, 1040])
def test_a_step_of_scattered_blocks_moves_whichever_way_and_direction(device, costs, kinds, size):
    memory, mover = DeviceMemory(device, kinds), mover_of(device, costs)
    choose = np.random.default_rng(size)
    lists, wanted = [], []
    for blocks in (20, 0, 7, 33):
        source, target = memory.alloc(size * 40), memory.alloc(size * 40)
        data = os.urandom(size * 40)
        memory.write(source, data)
        from_, to = choose.permutation(40)[:blocks], choose.permutation(40)[:blocks]
        lists.append(
            pieces_of(*((source + size * int(a), target + size * int(b), size) for a, b in zip(from_, to, strict=True)))
        )
        expected = bytearray(size * 40)
        for a, b in zip(from_, to, strict=True):
            expected[size * b : size * (b + 1)] = data[size * a : size * (a + 1)]
        wanted.append((target, bytes(expected)))
    flights = mover.submit_all(lists)
    for flight, (target, expected) in zip(flights, wanted, strict=True):
        flight.wait(SOON_S)
        assert memory.read(target, size * 40) == expected
    mover.close(SOON_S)
    del flight, flights
    assert not device.live
    assert len(device.memory) == 8, "only what the test took is left"


@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST)])
def test_a_piece_that_fits_no_slot_keeps_nothing_beside_it_from_being_staged(device, kinds):
    costs = Costs(gbps=50.0, piece_us=100.0, row_us=0.01, kernel_gbps=0.001)
    memory, mover = DeviceMemory(device, kinds), mover_of(device, dict.fromkeys(Direction, costs))
    source, target = memory.alloc(12288), memory.alloc(12288)
    data, begun, before = os.urandom(12288), len(device.log), mover.staging_bytes
    memory.write(source, data)
    small = pieces_of(*((source + 64 * n, target + 64 * n, 64) for n in range(64)))
    large = pieces_of((source + 4096, target + 4096, 8192))
    for flight in mover.submit_all([small, large]):
        flight.wait(SOON_S)
    assert memory.read(target, 12288) == data
    assert mover.staging_bytes >= before + SLOTS * 4096
    assert sum(call[0] == "launch" for call in device.log[begun:]) == 1
    mover.close(SOON_S)


def test_a_table_that_batches_share_needs_its_room_once_and_each_table_of_their_own_needs_its_own(device):
    memory, mover = DeviceMemory(device, (HOST, DEVICE)), mover_of(device)
    source, target, many = memory.alloc(1 << 20), memory.alloc(1 << 20), TABLE_BYTES // 24 // 2 // 3
    lane = mover._arm(Direction.UP).lane
    alike, own = ([pieces_of(*((source + 32 * n, target, 16) for n in range(many)))] for _ in range(2))
    own += [pieces_of(*((source + 32 * n, target, 16) for n in range(many))) for _ in range(3)]
    assert lane.choice([Series(piece) for piece in alike * 4], Waits.IDLE) is Way.STAGED
    assert lane.choice([Series(piece) for piece in own], Waits.IDLE) is Way.ENGINE
    mover.close(SOON_S)


def test_blocks_of_a_common_model_go_by_the_engine_only_to_a_forward_that_waits_idly():
    """A thread that launches a forward waits while copies are handed over: nothing to one that waits anyway."""
    size, count = 1 << 16, 128
    mover = mover_of(HostDevice(), {}, staging=SLOTS * size * 16)
    up, down = (mover._arm(direction).lane for direction in (Direction.UP, Direction.DOWN))
    blocks = [Series(pieces_of(*((size * n, (1 << 40) + 2 * size * n, size) for n in range(count))))]
    saved = [Series(pieces_of(*(((1 << 40) + 2 * size * n, size * n, size) for n in range(count))))]
    assert [up.choice(blocks, waits) for waits in Waits] == [Way.ENGINE, Way.STAGED, Way.STAGED]
    assert {down.choice(saved, waits) for waits in Waits} == {Way.STAGED}
    mover.close(SOON_S)


@pytest.mark.parametrize(
    ("row_us", "kernel_gbps", "slot", "way"), [(1.0, 16.0, 1 << 20, Way.STAGED), (0.9, 100.0, 1 << 12, Way.KERNEL)]
)
def test_blocks_whose_places_have_to_be_looked_at_go_so_too(row_us, kernel_gbps, slot, way):
    size, count = 1 << 15, 128
    mover = mover_of(HostDevice(), {Direction.UP: Costs(50.0, 1.0, row_us, kernel_gbps)}, staging=SLOTS * slot)
    blocks = [Series(pieces_of(*((size * n, (1 << 40) + 2 * size * n, size) for n in range(count))))]
    assert [mover._arm(Direction.UP).lane.choice(blocks, waits) for waits in Waits] == [Way.ENGINE, way, way]
    mover.close(SOON_S)


@pytest.mark.parametrize("waits", Waits)
@pytest.mark.parametrize("beside", ["nothing", "one that can't be staged", "one that waits for another"])
def test_who_waits_is_told_to_all_that_choose_a_way(device, waits, beside):
    size, count = 1 << 16, 128
    memory, mover = DeviceMemory(device, (HOST, DEVICE)), mover_of(device, {}, staging=SLOTS * size * 16)
    source, target = memory.alloc(size * count), memory.alloc(2 * size * count)
    odd_source, odd_target = memory.alloc(16), memory.alloc(16)
    data, odd, other, begun = os.urandom(size * count), os.urandom(7), HostFlight(), len(device.log)
    memory.write(source, data)
    memory.write(odd_source, odd)
    lists = [pieces_of(*((source + size * n, target + 2 * size * n, size) for n in range(count)))]
    if beside != "nothing":
        lists.append(pieces_of((odd_source, odd_target, 7)))
    after = [[other] if beside == "one that waits for another" and nth else [] for nth in range(len(lists))]
    flights = mover.submit_all(lists, after=after, waits=waits)
    other.land()
    for flight in flights:
        flight.wait(SOON_S)
    moved = memory.read(target, 2 * size * count)
    assert b"".join(moved[2 * size * n :][:size] for n in range(count)) == data
    assert beside == "nothing" or memory.read(odd_target, 7) == odd
    assert any(call[0] == "launch" for call in device.log[begun:]) == (waits is not Waits.IDLE)
    mover.close(SOON_S)


@pytest.mark.parametrize("costs", [{}, STAGED, KERNELS])
@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST)])
@pytest.mark.parametrize("ordered", [False, True])
def test_layers_that_share_their_arrays_share_a_table_and_move_each_from_its_own_place(device, costs, kinds, ordered):
    memory, mover, size, layers = DeviceMemory(device, kinds), mover_of(device, costs), 1024, 5
    source, target = memory.alloc(size * 40 * layers), memory.alloc(size * 40 * layers)
    data = os.urandom(size * 40 * layers)
    memory.write(source, data)
    from_, to = np.random.default_rng(0).permutation(40)[:20], np.random.default_rng(1).permutation(40)[:20]
    first = pieces_of(*((source + size * int(a), target + size * int(b), size) for a, b in zip(from_, to, strict=True)))
    lists = [replace(first, shift=(40 * size * n, 40 * size * (layers - 1 - n))) for n in range(layers)]
    before = mover.submit(pieces_of())
    before.wait(SOON_S)
    for flight in mover.submit_all(lists, after=[(mover.mark(),) if ordered else ()] * layers):
        flight.wait(SOON_S)
    expected = bytearray(size * 40 * layers)
    for n in range(layers):
        for a, b in zip(from_, to, strict=True):
            at, place = size * (40 * n + int(a)), size * (40 * (layers - 1 - n) + int(b))
            expected[place : place + size] = data[at : at + size]
    assert memory.read(target, len(expected)) == bytes(expected)
    mover.close(SOON_S)


@pytest.mark.parametrize("way", [Way.STAGED, Way.KERNEL])
@pytest.mark.parametrize("other", Way)
def test_a_program_takes_nothing_of_one_that_another_thread_is_writing(device, way, other):
    mover, memory = mover_of(device, only(way)), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(4096), memory.alloc(4096)
    memory.write(source, data := os.urandom(4096))
    rows = pieces_of(*((source + 64 * i, target + 64 * (63 - i), 64) for i in range(64)))
    elsewhere = pieces_of(*((source + 64 * i, memory.alloc(64), 64) for i in range(2)))
    lane, ours, theirs = mover._arm(Direction.UP).lane, Program(), Program()
    lane.tables.take_next(taken := [])
    lane.tables.take(taken)
    ours.tables, theirs.tables = taken[0], None if other is Way.ENGINE else taken[1]
    lane.start(ours, lane.granted(way))
    lane.start(theirs, lane.granted(other))
    lane.finish(theirs, lane.move(theirs, Series(elsewhere), range(1), other, 0, pinned=True))
    lane.finish(ours, lane.move(ours, Series(rows), range(1), way, 0, pinned=True))
    for program in (theirs, ours):
        device.issue(device.calls, (0, 0)).run(program.table(), NOTHING, np.zeros(1, np.int64), 1)
    assert memory.read(target, 4096) == b"".join(data[64 * i : 64 * (i + 1)] for i in reversed(range(64)))
    lane.tables.give_back(taken, 1)
    mover.close(SOON_S)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_sets_the_flags_it_was_given(device, loop):
    device.issue = loop_of(loop)
    mover, memory = mover_of(device), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(64), memory.alloc(64)
    flags = np.zeros(3, np.int32)
    lists = [pieces_of((source + 16 * i, target + 16 * i, 16)) for i in range(3)]
    at = [flags.ctypes.data + 4 * i for i in range(3)]
    mover.submit_all(lists, flags=at)
    for flight in mover.submit_all(lists, behind=at):  # a flag is set behind what it stands for, landed or not
        flight.wait(SOON_S)
    assert flags.tolist() == [1, 1, 1]
    assert [entry[2] for entry in device.log if entry[0] == "hold"] == at
    mover.close(SOON_S)


class Native(HostDevice):
    """A driver whose calls never enter the interpreter, as a real one's."""

    def __init__(self):
        super().__init__()
        from numba import carray, cfunc, types

        number, copy = types.int64, libc("memcpy", 3, keeping=True)

        @cfunc(types.int32(*[number] * 8))
        def copy_batch(to, from_, nbytes, count, _attributes, _indices, _one, _stream):
            row = np.empty(3, np.int64)
            for nth in range(count):
                copy(row.ctypes.data, to + 8 * nth, 8)
                copy(row.ctypes.data + 8, from_ + 8 * nth, 8)
                copy(row.ctypes.data + 16, nbytes + 8 * nth, 8)
                copy(row[0], row[1], row[2])
            return 0

        @cfunc(types.int32(*[number] * 4))
        def one(to, from_, nbytes, _stream):
            copy(to, from_, nbytes)
            return 0

        @cfunc(types.int32(*[number] * 11))
        def launch(_function, _x, _y, _z, _threads, _by, _bz, _shared, _stream, pointers, _extra):
            values, at, row = np.empty(7, np.int64), np.empty(1, np.int64), np.empty(3, np.int64)
            for nth in range(7):
                copy(at.ctypes.data, pointers + 8 * nth, 8)
                copy(values.ctypes.data + 8 * nth, at[0], 8)
            for piece in range(values[3]):
                for nth in range(3):
                    copy(row.ctypes.data + 8 * nth, values[nth] + 8 * piece, 8)
                copy(row[1] + values[6], row[0] + values[5], 8 * row[2])
            return 0

        @cfunc(types.int32(number, types.CPointer(types.uint32), number, number))
        def write(_stream, word, value, _flags):
            carray(word, 1)[0] = value & 0xFFFFFFFF
            return 0

        nothing = {count: cfunc(types.int32(*[number] * count))(_nothing(count)) for count in (2, 3)}
        self.kept = copy_batch, one, launch, write, nothing
        made = {"copy_batch": (copy_batch, 8), "copy": (one, 4), "launch": (launch, 11), "write": (write, 4)}
        made |= {"record": (nothing[2], 2), "wait": (nothing[3], 3)}
        typed = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count)(call.address)
            for name, (call, count) in made.items()
        }
        self.calls = dataclasses.replace(self.calls, **typed)


def _nothing(arguments):
    return (lambda a, b: 0) if arguments == 2 else (lambda a, b, c: 0)


@pytest.fixture(scope="module")
def native():
    make = loop_of("compiled")
    device = Native()
    device.issue = make(device.calls, (0, 0))
    return device


@pytest.mark.parametrize("way", [Way.ENGINE, Way.KERNEL])
@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST), (DEVICE,)])
def test_what_is_submitted_moves_though_the_interpreter_is_never_let_go(native, kinds, way):
    """The thread that submits spins, and no other gets the interpreter, until the bytes are in place."""
    device, layers = native, 8
    mover = CudaMover(device, dataclasses.replace(KERNEL, scribe=compiled_scribe()), device.issue, lambda: 1)
    mover.prefer(only(way))
    memory = DeviceMemory(device, kinds)
    source, target = memory.alloc(4096 * layers), memory.alloc(4096 * layers)
    rows = pieces_of(*((source + 128 * i, target + 128 * (31 - i), 128) for i in range(32)))
    batches = [replace(rows, shift=(4096 * n, 4096 * n)) for n in range(layers)]
    last = ctypes.c_uint8.from_address(target + 4096 * layers - 1)
    mover.submit(rows).wait(SOON_S)
    for value in (1, 2, 3):
        threading.Event().wait(BRIEF_S)  # the thread that issues goes to sleep
        memory.write(source, data := os.urandom(4096 * (layers - 1)) + bytes([value]) * 4096)
        with interpreter_kept(SOON_S):
            flights = mover.submit_all(batches)
            moved, issued = spun(last, value, SOON_S), flights[0].wave.issued.is_set()
        assert moved
        assert not issued, "the thread that issues has had the interpreter"
        for flight in flights:
            flight.wait(SOON_S)
        order = np.frombuffer(data, np.uint8).reshape(layers, 32, 128)[:, ::-1]
        assert memory.read(target, len(data)) == order.tobytes()
    mover.close(SOON_S)


def test_what_is_submitted_before_the_last_was_picked_up_moves_in_its_turn(device, monkeypatch):
    """Programs that find no room to be laid out are issued by Python, and counted like all others."""
    mover, memory = mover_of(device, {}), DeviceMemory(device, (HOST, DEVICE))
    laid, lay = [], Desk.lay
    monkeypatch.setattr(Desk, "lay", lambda *given: laid.append(lay(*given)) or laid[-1])
    source, target = memory.alloc(64), memory.alloc(64)
    flights = [flight for _ in range(50) for flight in mover.submit_all([pieces_of((source, target, 16))] * 2)]
    for flight in flights:
        flight.wait(SOON_S)
    assert [entry[3] for entry in device.log if entry[0] == "write"] == list(range(1, 101))
    assert laid[0]
    assert len(laid) == 50
    mover.close(SOON_S)


def series_in(memory, blocks, turns, size=64):
    """(a series over new memory, where each of its parts lands, what is to be there)."""
    parts, step = len(turns), size * (2 * blocks)
    source, target = memory.alloc(step * parts), memory.alloc(step * parts)
    memory.write(source, data := os.urandom(step * parts))
    rows = pieces_of(*((source + size * 2 * i, target + size * (2 * (blocks - i) - 1), size) for i in range(blocks)))
    series = Series(rows, np.array([(step * n, step * (parts - 1 - n)) for n in range(parts)]), turns)
    ends = [target + step * (parts - 1 - n) + size for n in range(parts)]
    return series, ends, [data[step * n + size * 2 * (blocks - 1) :][:size] for n in range(parts)]


@pytest.mark.parametrize("costs", [{}, STAGED, KERNELS])
@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST)])
def test_parts_of_several_series_move_by_their_turns_and_each_has_its_number(device, costs, kinds):
    mover, memory = mover_of(device, costs), DeviceMemory(device, kinds)
    turns = (0, 1, 2, 3), (1, 3), (0, 2, 3)
    made = [series_in(memory, blocks, ours) for blocks, ours in zip((2, 5, 3), turns, strict=True)]
    flights = mover.submit_all([series for series, _, _ in made])
    for flight, (_, ends, wanted) in zip(flights, made, strict=True):
        flight.wait(SOON_S)
        assert [memory.read(end, 64) for end in ends] == wanted
    order = sorted((turn, batch, nth) for batch, ours in enumerate(turns) for nth, turn in enumerate(ours))
    assert [flights[batch].part(nth).number for _, batch, nth in order] == list(range(1, 10))
    mover.close(SOON_S)


class Second(dict):
    """Of all calls of that name the one that fails."""

    seen = 0

    def __contains__(self, name):
        self.seen += name in self.keys()
        return name in self.keys() and self.seen == 2


@pytest.mark.parametrize(("way", "call"), [(Way.ENGINE, "copy_batch"), (Way.KERNEL, "launch")])
def test_a_part_that_the_device_refuses_fails_its_series_and_no_other(device, way, call):
    mover, memory = mover_of(device, only(way)), DeviceMemory(device, (HOST, DEVICE))
    (one, ends, wanted), (other, *_) = [series_in(memory, 3, (0, 1, 2)) for _ in range(2)]
    device.failing = Second({call: 1})
    good, bad = mover.submit_all([one, other])
    good.wait(SOON_S)
    assert [memory.read(end, 64) for end in ends] == wanted
    with pytest.raises(DeviceFailed):
        bad.wait(SOON_S)
    assert [bool(bad.part(nth).refusal) for nth in range(3)] == [True, False, False]
    assert isinstance(bad.error, DeviceFailed)
    assert bad.part(1).error is None
    mover.close(SOON_S)


class First(Second):
    """The same, of the first one."""

    seen = 1


@pytest.mark.parametrize(("way", "call"), [(Way.ENGINE, "copy_batch"), (Way.KERNEL, "launch")])
def test_a_batch_that_the_device_refuses_has_failed_once_it_is_counted_though_the_rest_is_still_being_issued(
    device, monkeypatch, way, call
):
    mover, memory = mover_of(device, only(way)), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(4096), memory.alloc(4096)
    pieces = pieces_of((source, target, 32), (source + 64, target + 64, 32))
    device.failing, go, done = First({call: 1}), threading.Event(), getattr(device, f"_{call}")
    monkeypatch.setattr(device, f"_{call}", lambda *given: (go.wait(SOON_S), done(*given))[1])
    bad, good = mover.submit_all([pieces, pieces])
    with pytest.raises(DeviceFailed):
        bad.wait(SOON_S)
    assert bad.refusal
    assert not good.done
    go.set()
    good.wait(SOON_S)
    mover.close(SOON_S)


@pytest.mark.parametrize("costs", [{}, STAGED, KERNELS])
@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST)])
def test_one_stream_counts_all_batches_of_a_step_those_that_move_nothing_too(device, costs, kinds):
    mover, memory = mover_of(device, costs), DeviceMemory(device, kinds)
    source, target = memory.alloc(4096), memory.alloc(4096)
    some, none = pieces_of((source, target, 32), (source + 64, target + 64, 32)), pieces_of()
    for flight in mover.submit_all([some, none, some, none, some, none]):
        flight.wait(SOON_S)
    counted = [(entry[1], entry[3]) for entry in device.log if entry[0] == "write"]
    assert [number for _, number in counted] == list(range(1, 7))
    assert len({stream for stream, _ in counted}) == 1
    mover.close(SOON_S)


@pytest.mark.parametrize("costs", [{}, STAGED, KERNELS])
@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST)])
def test_a_batch_that_moves_nothing_has_not_come_before_what_it_waits_for(later, costs, kinds):
    mover, memory, words = mover_of(later, costs), DeviceMemory(later, kinds), np.zeros(2, np.int32)
    source, target = memory.alloc(4096), memory.alloc(4096)
    some, none = pieces_of((source, target, 32), (source + 64, target + 64, 32)), pieces_of()
    (other,) = mover.submit_all([pieces_of((target + 128, source + 128, 32))], behind=[words.ctypes.data])
    assert other.wave.issued.wait(SOON_S)
    held = [0, words.ctypes.data + 4, 0, 0]
    flights = mover.submit_all([some, none, some, none], after=[[], [], [], [other]], behind=held)
    for ended, word in ((1, 1), (3, 0)):
        flights[ended - 1].wait(SOON_S)
        time.sleep(BRIEF_S)
        assert [flight.done for flight in flights] == [nth < ended for nth in range(4)]
        words[word] = 1
    flights[-1].wait(SOON_S)
    assert other.done
    mover.close(SOON_S)


@pytest.mark.parametrize("before", list(Way))
@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("call", ["launch", "copy_batch", None])
def test_a_batch_that_is_empty_or_refused_is_not_counted_before_what_another_way_still_moves(later, before, way, call):
    mover, memory, word = mover_of(later, only(before)), DeviceMemory(later, (HOST, DEVICE)), np.zeros(1, np.int32)
    source, target = memory.alloc(4096), memory.alloc(4096)
    size = 32 if call else 0
    first = mover.submit_all(
        [pieces_of((source, target, 32), (source + 64, target + 64, 32))], behind=[word.ctypes.data]
    )[0]
    assert first.wave.issued.wait(SOON_S)
    later.failing = {call: 1} if call else {}
    mover.prefer(only(way))
    second = mover.submit(pieces_of((source, target, size), (source + 64, target + 64, size)))
    assert second.wave.issued.wait(SOON_S)
    time.sleep(BRIEF_S)
    assert (first.done, second.done) == (False, False)
    later.failing, word[:] = {}, 1
    first.wait(SOON_S)
    assert second.wave.wait(SOON_S) is None
    mover.close(SOON_S)


@pytest.mark.parametrize("before", list(Way))
@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("call", ["record", "wait"])
@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST)])
def test_a_batch_behind_which_no_stream_can_be_put_has_not_ended_before_it_and_what_came_before_have_moved(
    later, before, way, call, kinds
):
    """Blocks of a batch that has failed are given to others, so nothing may write them any more."""
    mover, memory, words = mover_of(later, only(before)), DeviceMemory(later, kinds), np.zeros(2, np.int32)
    source, target = memory.alloc(4096), memory.alloc(4096)
    memory.write(source, b"x" * 4096)
    first, second = [pieces_of(*((source + at, target + at, 32) for at in (at, at + 64))) for at in (0, 1024)]
    (good,) = mover.submit_all([first], behind=[words.ctypes.data])
    assert good.wave.issued.wait(SOON_S)
    mover.prefer(only(way))
    later.failing = {call: 1}
    (bad,) = mover.submit_all([second], behind=[words.ctypes.data + 4])
    time.sleep(BRIEF_S)
    assert (good.done, bad.done) == (False, False)
    words[0] = 1
    time.sleep(BRIEF_S)
    assert memory.read(target + 1024, 32) == bytes(32)
    words[1] = 1
    with suppress(DeviceFailed):  # where it had been counted before
        bad.wait(SOON_S)
    ended = memory.read(target + 1024, 32)
    good.wait(SOON_S)
    assert memory.read(target, 32) == b"x" * 32
    later.failing = {}
    mover.close(SOON_S)
    assert memory.read(target + 1024, 32) == ended


@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST), (DEVICE,)])
@pytest.mark.parametrize("since", [0, 1])
def test_copies_between_memories_go_beside_compute_where_a_driver_wants_to_be_told(device, kinds, since):
    """Inside a device they go as it likes."""
    device.version = BESIDE_SINCE - 1 + since
    mover, memory = mover_of(device, only(Way.ENGINE)), DeviceMemory(device, kinds)
    source, target = memory.alloc(64), memory.alloc(64)
    mover.submit(pieces_of((source, target, 16), (source + 32, target + 32, 16))).wait(SOON_S)
    first, _ = device.batch_attributes
    handed = {entry[5] - first for entry in device.log if entry[0] == "copy_batch"}
    assert handed == {ATTRIBUTES_BYTES * (since and len(kinds) == 2)}
    mover.close(SOON_S)


def test_a_step_behind_a_mark_is_held_by_the_device_not_by_the_host(device):
    mover, memory = mover_of(device), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(64), memory.alloc(64)
    mark = mover.mark()
    mover.submit(pieces_of((source, target, 16), (source + 32, target + 32, 16)), after=[mark]).wait(SOON_S)
    waited = [entry for entry in device.log if entry[0] == "wait" and entry[2] == mark.event.handle]
    assert waited, "the stream that copies waits for it"
    mark.wait(SOON_S)
    mover.close(SOON_S)


def test_a_step_behind_a_failed_flight_fails_as_a_whole(device):
    mover, memory = mover_of(device), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(64), memory.alloc(64)
    arrival = HostFlight()
    flights = mover.submit_all([pieces_of((source, target, 16))] * 3, after=[[arrival]] * 3)
    arrival.fail(Missing("gone"))
    for flight in flights:
        with pytest.raises(Missing):
            flight.wait(SOON_S)
    mover.close(SOON_S)


def test_a_step_that_waits_for_the_same_flights_as_a_whole_is_issued_as_a_whole(device):
    mover, memory = mover_of(device, {}), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(64), memory.alloc(64)
    start, pieces = HostFlight(), pieces_of((source, target, 16))
    behind = (start,)
    together = mover.submit_all([pieces] * 3, after=[behind] * 3)
    assert len({id(flight.wave) for flight in together}) == 1
    apart = mover.submit_all([pieces] * 2, after=[behind, ()])
    assert len({id(flight.wave) for flight in apart}) == 2
    apart[1].wait(SOON_S)
    assert not any(flight.done for flight in (*together, apart[0]))
    start.land()
    for flight in (*together, apart[0]):
        flight.wait(SOON_S)
    mover.close(SOON_S)


@pytest.mark.parametrize("call", ["copy_batch", "launch", "sleep"])
def test_an_error_of_the_device_fails_the_flight_and_stops_nothing(device, call):
    mover, memory = mover_of(device, KERNELS if call == "launch" else {}), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(4096), memory.alloc(4096)
    memory.write(source, b"x" * 4096)
    rows = [(source, target, 32), (source + 64, target + 64, 32)]
    lists = [pieces_of(*rows) if call == "launch" else pieces_of(rows[0])]
    device.failing[call] = 1
    (flight,) = mover.submit_all(lists)
    with pytest.raises(DeviceFailed, match="1"):
        flight.wait(SOON_S)
    assert mover.halted == ""
    device.failing.clear()
    (flight,) = mover.submit_all(lists)
    flight.wait(SOON_S)
    assert memory.read(target, 32) == b"x" * 32
    mover.close(SOON_S)


def test_a_flight_has_landed_as_soon_as_the_device_has_counted_it_whoever_is_told_later(device, monkeypatch):
    mover, memory = mover_of(device, {}), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(64), memory.alloc(64)
    memory.write(source, b"x" * 64)
    slow = threading.Event()
    monkeypatch.setattr(device, "sleep_until", lambda *_: slow.wait(SOON_S))
    flight, told = mover.submit(pieces_of((source, target, 16))), []
    flight.then(told.append)
    flight.wait(SOON_S)
    assert flight.done
    assert flight.error is None
    assert memory.read(target, 16) == b"x" * 16
    assert told == []
    slow.set()
    flight.wave.wait(SOON_S)
    mover.close(SOON_S)
    assert told == [flight]
    assert flight.done


@pytest.mark.parametrize("call", ["copy_batch", "sleep"])
def test_a_mover_whose_device_is_lost_says_so(device, call):
    mover, memory = mover_of(device, {}), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(64), memory.alloc(64)
    assert mover.halted == ""
    device.failing[call] = 700
    with pytest.raises(DeviceFailed, match="restart the engine"):
        mover.submit(pieces_of((source, target, 16))).wait(SOON_S)
    assert "700" in mover.halted
    device.failing.clear()
    mover.close(SOON_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dies", ["_issue", "sleep_until"])
def test_a_mover_a_thread_of_which_has_ended_by_itself_says_so_and_keeps_nobody_waiting(device, dies, monkeypatch):
    mover, memory = mover_of(device, {}), DeviceMemory(device, (HOST, DEVICE))
    source, target = memory.alloc(64), memory.alloc(64)
    pieces = pieces_of((source, target, 16))
    mover.submit(pieces).wait(SOON_S)
    assert mover.halted == ""
    if dies == "_issue":
        monkeypatch.setattr(Desk, "lay", lambda *_: False)
        monkeypatch.setattr(mover, "_issue", mover._issue._replace(run=lambda *_: sys.exit()))
    else:
        monkeypatch.setattr(device, dies, lambda *_: sys.exit())
    for flight in (
        [mover.submit(pieces), *mover.submit_all([pieces] * 2)] if dies == "sleep_until" else [mover.submit(pieces)]
    ):
        with pytest.raises(BrokenInvariant, match="restart the engine"):
            flight.wave.wait(SOON_S)  # as whoever is told; who looks at the count may see that it has landed
    assert "restart the engine" in mover.halted
    monkeypatch.undo()
    mover.close(SOON_S)


@pytest.fixture
def later():
    device = AsyncDevice()
    yield device
    device.end()


def test_a_mover_that_is_closed_keeps_what_others_wait_for_until_all_directions_have_come_to_their_end(later):
    """Copies that wait on the device for those of another direction look at its count when they get there."""
    device, flag, go = later, np.zeros(1, np.int32), threading.Event()
    mover, rows = mover_of(device, {}), pieces_of((device.host_memory(64), device.device_memory(64), 64))
    back = pieces_of((int(rows.target[0]), device.host_memory(64), 64))
    (first,) = mover.submit_all([rows], behind=[flag.ctypes.data])
    assert first.wave.issued.wait(SOON_S)
    mover.aside(partial(go.wait, SOON_S), lambda _: None)
    second, ours = mover.submit(back, after=[first]), mover._arm(Direction.UP).line
    closing = threading.Thread(target=mover.close, args=(SOON_S,))
    closing.start()
    flag[0] = 1
    ours._thread.join(SOON_S)
    closing.join(BRIEF_S)
    assert first.wave.tally.address in device.memory
    go.set()
    second.wait(SOON_S)
    closing.join(SOON_S)
    assert not closing.is_alive()
    assert not device.troubles


def test_without_device_memory_for_staging_copies_go_by_the_engine(device):
    device.room = 3 << 20
    memory, mover = DeviceMemory(device, (HOST, DEVICE)), mover_of(device)
    source, target = memory.alloc(4096), memory.alloc(4096)
    memory.write(source, b"x" * 4096)
    mover.submit(pieces_of((source, target, 32), (source + 64, target + 64, 32))).wait(SOON_S)
    assert memory.read(target, 96) == b"x" * 32 + bytes(32) + b"x" * 32
    assert not any(entry[0] == "launch" for entry in device.log)
    mover.close(SOON_S)


def test_memory_to_stage_in_is_taken_with_the_first_copies_that_are_staged(device):
    memory, mover = DeviceMemory(device, (HOST, DEVICE)), mover_of(device, only(Way.ENGINE))
    source, target = memory.alloc(4096), memory.alloc(4096)
    memory.write(source, data := os.urandom(4096))
    rows, before = pieces_of((source, target, 32), (source + 64, target + 64, 32)), mover.staging_bytes
    mover.submit(rows).wait(SOON_S)
    assert mover.staging_bytes == before
    mover.prefer(STAGED)
    assert mover.staging_bytes == before
    for _ in range(2):
        mover.submit(rows).wait(SOON_S)
        assert mover.staging_bytes == before + SLOTS * 4096
    assert memory.read(target, 96) == data[:32] + bytes(32) + data[64:96]
    mover.close(SOON_S)
    assert mover.staging_bytes == 0


def test_memory_that_is_not_pinned_moves_piece_by_piece(device):
    memory, mover = DeviceMemory(device, (DEVICE,)), mover_of(device)
    source, target = np.full(4096, 7, np.uint8), memory.alloc(4096)
    at = source.ctypes.data // 16 * 16 + 16
    mover.submit(pieces_of((at, target, 32), (at + 64, target + 64, 32))).wait(SOON_S)
    assert memory.read(target, 96) == b"\x07" * 32 + bytes(32) + b"\x07" * 32
    mover.close(SOON_S)  # what is waited for comes before the last calls of its program
    assert {entry[0] for entry in device.log} == {"copy", "record", "wait", "write"}


def test_a_step_inside_the_device_and_in_memory_that_is_not_pinned_moves_piece_by_piece(device):
    """The device's memory may begin below and end above the other."""
    room, mover = np.zeros(3 * 4096 + 16, np.uint8), mover_of(device, KERNELS)
    low, middle, high = ((room.ctypes.data // 16 + 1) * 16 + 4096 * nth for nth in range(3))
    device.memory |= dict.fromkeys((low, high), (DEVICE, 4096, room))
    ctypes.memmove(low, data := os.urandom(3 * 4096), len(data))
    ours = pieces_of((low, high, 32), (low + 64, high + 64, 32))
    theirs = pieces_of((middle, middle + 2048, 32), (middle + 64, middle + 2112, 32))
    for flight in mover.submit_all([ours, theirs]):
        flight.wait(SOON_S)
    assert ctypes.string_at(high + 64, 32) == data[64:96]
    assert ctypes.string_at(middle + 2112, 32) == data[4096 + 64 : 4096 + 96]
    mover.close(SOON_S)  # what is waited for comes before the last calls of its program
    assert {entry[0] for entry in device.log} == {"copy", "record", "wait", "write"}


@pytest.mark.parametrize("far", ["source", "target"])
def test_copies_between_devices_go_by_the_kernel_and_are_not_staged(device, far):
    memory, mover = DeviceMemory(device, (DEVICE,)), mover_of(device, KERNELS)
    source, target = memory.alloc(4096), memory.alloc(4096)
    memory.write(source, os.urandom(4096))
    device.elsewhere.add(source if far == "source" else target)
    before = mover.staging_bytes
    rows = [(source + 64 * i, target + 4096 - 64 * (i + 1), 32) for i in range(64)]
    mover.submit(pieces_of(*rows)).wait(SOON_S)
    for from_, to, nbytes in rows:
        assert memory.read(to, nbytes) == memory.read(from_, nbytes)
    (launch,) = [entry for entry in device.log if entry[0] == "launch"]
    assert launch[2] == GRID[Direction.PEER]
    assert mover.staging_bytes == before
    mover.close(SOON_S)
