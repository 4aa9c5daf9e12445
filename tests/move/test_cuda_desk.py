import queue
import threading
import time
import weakref

import numpy as np
import pytest
from host_device import HostDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import LOOPS, loop_of

from layercast.move.cuda_desk import Desk
from layercast.move.cuda_program import Program
from layercast.move.cuda_rows import TALLY_BYTES
from layercast.plan.pieces import Series
from layercast.testing.move_laws import pieces_of

CUTS = np.zeros(0, np.int64)


@pytest.fixture(scope="module", params=LOOPS)
def device(request):
    device = HostDevice()
    device.issue = loop_of(request.param)(device.calls, (0, 0))
    return device


def desk_of(device, bind=lambda: None):
    device.log.clear()
    desk = Desk(device.issue, device.calls.ring, bind)
    weakref.finalize(desk, desk._bell.close)
    return desk


class Counting:
    """A program that sets a word to where it was told to stand, and what must stay until it has run."""

    def __init__(self):
        self.word, self.errors = np.full(TALLY_BYTES // 4, -1, np.int32), np.zeros(1, np.int64)
        self.word[0] = 0
        self.program = program = Program()
        program.copies(Series(pieces_of()), range(1), 1, batched=True, tally=self.word.ctypes.data, number=7)
        self.table = program.table()

    def laid_on(self, desk, first):
        return desk.lay(self.table, CUTS, self.errors, first)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["lay", "put", "get", "stir"]), max_size=30))
def test_what_is_laid_out_runs_once_before_its_item_is_got_and_all_items_keep_their_order(device, steps):
    desk, put, got, programs = desk_of(device), 0, 0, {}
    for step in steps:
        if step == "get" and got < put:
            assert desk.get() == got
            got += 1
        elif step == "stir":
            desk.stir()
        elif step != "get":
            program = Counting()
            if step == "lay" and program.laid_on(desk, 100 * put):
                assert not any(number >= got for number in programs), "one at a time"
                programs[put] = program
            desk.put(put)
            put += 1
        for number, program in programs.items():
            assert program.word[0] == (100 * number + 7 if number < got else 0)
    assert len(device.log) == sum(number < got for number in programs)


def test_the_first_program_finds_room_and_so_does_one_whose_forerunners_have_been_picked_up(device):
    desk, program = desk_of(device), Counting()
    for first in range(3):
        assert program.laid_on(desk, first)
        desk.put(None)
        assert not program.laid_on(desk, first)
        desk.put(None)
        desk.get()
        desk.get()
        assert program.word[0] == first + 7


def test_an_error_of_the_device_is_told_to_who_laid_the_program_out(device):
    desk, program = desk_of(device), Counting()
    device.failing["write"] = 3
    program.laid_on(desk, 0)
    desk.put(None)
    desk.get()
    device.failing.clear()
    assert program.errors.tolist() == [3]


def test_a_thread_binds_once_before_its_first_item_and_what_nobody_gets_can_be_taken(device):
    bound = []
    desk = desk_of(device, lambda: bound.append(True))
    for _ in range(3):
        desk.put(None)
    assert bound == []
    desk.get()
    desk.get()
    assert bound == [True]
    desk.get_nowait()
    with pytest.raises(queue.Empty):
        desk.get_nowait()


def test_a_thread_that_is_stirred_for_nothing_sleeps_on_and_gets_what_comes_later(device):
    desk, got = desk_of(device), []
    thread = threading.Thread(target=lambda: got.extend([desk.get(), desk.get()]))
    thread.start()
    for item in "ab":
        desk.stir()
        worked = time.process_time()
        time.sleep(0.3)
        assert item not in got
        assert time.process_time() - worked < 0.2, "it looks out for a moment only"
        desk.put(item)
    thread.join(5.0)
    assert got == ["a", "b"]
