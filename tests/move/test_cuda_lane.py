"""What follows what in one lane, whichever ways its programs go and whatever of them takes its time."""

import threading
import time
from functools import partial

import numpy as np
import pytest
from async_device import AsyncDevice
from host_device import DeviceMemory, HostDevice
from test_cuda_mover import Second, mover_of, series_in

from layercast.errors import DeviceFailed
from layercast.move.base import Waits
from layercast.move.costs import Direction, Way, only
from layercast.move.cuda_driver import DEVICE, HOST
from layercast.testing.move_laws import BRIEF_S, SOON_S, pieces_of


@pytest.fixture
def device():
    device = AsyncDevice()
    yield device
    device.end()


def kept_waiting(device, monkeypatch, nth):
    """(an event behind which the device does the nth copy or launch that it gets from now on, all that it has got)."""
    go, seen = threading.Event(), []

    def call(made, *given):
        stream, work = made(*given)
        seen.append(made)
        late = len(seen) == nth + 1
        return stream, lambda: (late and go.wait(SOON_S), work())[1]

    for name in ("_copy_batch", "_copy", "_launch"):
        monkeypatch.setattr(device, name, partial(call, getattr(device, name)))
    return go, seen


@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST)])
@pytest.mark.parametrize("before", Way)
@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("nth", range(3))
def test_what_comes_later_neither_moves_nor_counts_before_all_that_came_first(
    device, monkeypatch, kinds, before, way, nth
):
    """Whatever is slow of it: a table that is taken up, a slot that fills, one that empties, either turn of a relay."""
    memory, mover = DeviceMemory(device, kinds), mover_of(device, only(before))
    one, target, two, _ = [memory.alloc(256) for _ in range(4)]
    memory.write(one, b"1" * 256)
    memory.write(two, b"2" * 256)
    first, second = (
        [pieces_of(*((at + n, target + n, 32) for n in (part, part + 64))) for part in (0, 128)] for at in (one, two)
    )
    go, seen = kept_waiting(device, monkeypatch, nth)
    early = mover.submit_all(first)[-1]
    assert early.wave.issued.wait(SOON_S)
    held = len(seen) > nth
    mover.prefer(only(way))
    empty, _, last = mover.submit_all([pieces_of(), *second])
    assert last.wave.issued.wait(SOON_S)
    time.sleep(BRIEF_S)
    assert not (held and (early.done or empty.done or b"2" in memory.read(target, 256)))
    go.set()
    last.wait(SOON_S)
    assert early.done
    assert memory.read(target, 256) == (b"2" * 32 + bytes(32)) * 4
    mover.close(SOON_S)


@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST)])
def test_what_is_staged_fills_slots_while_the_last_one_before_it_still_empties(device, monkeypatch, kinds):
    memory, mover = DeviceMemory(device, kinds), mover_of(device)
    source, target = memory.alloc(256), memory.alloc(256)
    some = pieces_of((source, target, 32), (source + 64, target + 64, 32))
    mover.submit(some).wait(SOON_S)
    go, _ = kept_waiting(device, monkeypatch, 4)  # behind the table, two that fill and one that empties
    _, held = mover.submit_all([some, some])
    last = mover.submit(some)
    assert last.wave.issued.wait(SOON_S)
    time.sleep(BRIEF_S)
    lane = mover._arm(Direction.UP if kinds[0] == HOST else Direction.DOWN).lane
    filled, emptied, *_ = lane.staging.slots.events
    assert [device.happened(filled), device.happened(emptied), held.done] == [True, False, False]
    go.set()
    last.wait(SOON_S)
    mover.close(SOON_S)


@pytest.mark.parametrize("nth", range(3))
def test_what_is_passed_over_is_counted_behind_all_that_its_lane_has_and_before_all_that_it_gets(device, nth):
    """As where a program breaks off: how far it has come is not known, and its blocks are given to others."""
    mover, word, memory = mover_of(device), np.zeros(1, np.int32), DeviceMemory(device, (HOST, DEVICE))
    source, target, lane = memory.alloc(256), memory.alloc(256), mover._arm(Direction.UP).lane
    device.stream_waits_for_value(lane._relay.streams[nth], word.ctypes.data, 1)
    number = lane.tally.queue(1)
    lane.tables.take_next(taken := [])
    lane.skip(number, taken)
    some = pieces_of((source, target, 32), (source + 64, target + 64, 32))
    empty, flight = mover.submit_all([pieces_of(), some])
    assert flight.wave.issued.wait(SOON_S)
    time.sleep(BRIEF_S)
    assert [lane.tally.reached(number), empty.done, device.happened(taken[0].free)] == [False] * 3
    word[:] = 1
    flight.wait(SOON_S)
    assert lane.tally.reached(number)
    lane.tables.give_back(taken, number)
    mover.close(SOON_S)


class Sixth(Second):
    """Of all calls of that name the one that fails."""

    seen = -4


@pytest.mark.parametrize("kinds", [(HOST, DEVICE), (DEVICE, HOST)])
@pytest.mark.parametrize(
    ("way", "call"),
    [(Way.ENGINE, "copy_batch"), (Way.KERNEL, "launch"), (Way.STAGED, "launch"), (Way.STAGED, "copy_batch")],
)
def test_series_that_go_one_behind_the_other_fail_each_by_itself_if_but_the_last_part_does(kinds, way, call):
    device = HostDevice()
    memory, mover = DeviceMemory(device, kinds), mover_of(device, only(way))
    (one, ends, wanted), (other, *_) = [series_in(memory, 3, turns) for turns in ((0, 1, 2), (3, 4, 5))]
    device.failing = Sixth({call: 1})
    good, bad = mover.submit_all([one, other])
    good.wait(SOON_S)
    with pytest.raises(DeviceFailed):
        bad.wait(SOON_S)
    assert [memory.read(end, 64) for end in ends] == wanted
    assert [bool(bad.part(nth).refusal) for nth in range(3)] == [False, False, True]
    assert good.error is None
    device.failing = {}
    again, ends, wanted = series_in(memory, 5, tuple(range(9)))
    mover.submit_all([again])[0].wait(SOON_S)
    assert [memory.read(end, 64) for end in ends] == wanted
    mover.close(SOON_S)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("held", range(3))
def test_a_lane_that_waits_holds_up_no_other(device, way, held):
    """As on a GPU (`test_cuda`), where its streams must share no hardware queue with theirs either."""
    mover, word = mover_of(device, only(way)), np.zeros(1, np.int32)
    kinds = [(HOST, DEVICE), (DEVICE, HOST), (HOST, DEVICE)]
    ends = [(memory.alloc(256), memory.alloc(256)) for memory in (DeviceMemory(device, each) for each in kinds)]

    def submit(nth, after=()):
        """A load, a save, or a load in the background."""
        source, target = ends[nth]
        some = pieces_of(*((source + at, target + (at ^ 32), 32) for at in range(0, 256, 32)))
        return mover.submit_all([some], after=[after], waits=Waits.NOBODY if nth == 2 else Waits.BUSY)[0]

    device.stream_waits_for_value(device.compute, word.ctypes.data, 1)
    late = submit(held, [mover.mark()])
    for nth in {0, 1, 2} - {held}:
        submit(nth).wait(SOON_S)
    assert not late.done
    word[:] = 1
    late.wait(SOON_S)
    mover.close(SOON_S)
