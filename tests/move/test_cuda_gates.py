import os
import resource
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from host_device import DeviceMemory, HostDevice
from hypothesis import given
from hypothesis import strategies as st

from layercast.errors import BadTransition, DeadlineExceeded, Refused
from layercast.landing import Latch
from layercast.move import cuda_bell
from layercast.move.costs import Direction
from layercast.move.cuda import CudaMover
from layercast.move.cuda_bell import Bell
from layercast.move.cuda_driver import DEVICE
from layercast.move.cuda_flights import CudaFlight, Event, Tally, Wave, moving
from layercast.move.cuda_gates import CudaGate, FlagGate
from layercast.move.cuda_hold import OVER, plain_hold
from layercast.move.cuda_issue import plain_issue
from layercast.move.cuda_program import Program
from layercast.move.cuda_rows import TALLY_BYTES
from layercast.move.flights import HostFlight
from layercast.move.gates import CpuGate
from layercast.move.words import words_at
from layercast.plan.pieces import Series
from layercast.testing.gate_laws import GateLaws
from layercast.testing.move_laws import BRIEF_S, SOON_S, pieces_of


def gate_of(device):
    """One whose forwards run on stream 99."""
    return CudaGate(device, lambda: 99, plain_hold(device.calls))


def held_by(device):
    """The numbers that stream 99 was made to wait for."""
    return [entry[3] for entry in device.log if entry[:2] == ("hold", 99)]


def not_learned_of(flight):
    """As if the host had not learned of its end yet."""
    flight.wave._over = Latch()
    flight.wave.words[OVER] = 0


class TestCudaGate(GateLaws):
    def make_gate(self):
        return gate_of(HostDevice())


class TestFlagGate(GateLaws):
    def make_gate(self):
        return FlagGate(HostDevice(), 8)


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def mover(device):
    mover = CudaMover(device, None, plain_issue(device.calls, (0, 0)), lambda: 1)
    yield mover
    mover.close(SOON_S)


@pytest.fixture
def batch(device):
    memory = DeviceMemory(device, (DEVICE,))
    return pieces_of((memory.alloc(64), memory.alloc(64), 64))


def test_the_callers_stream_waits_for_a_copy_that_has_not_moved_yet(device, mover, batch):
    gate = gate_of(device)
    gate.arm({0: 1})
    word = words_at(mover._arm(Direction.LOCAL).lane.tally.address, 1)
    flight = mover.submit(batch)
    flight.wave.wait(SOON_S)
    not_learned_of(flight)
    word[0] = -1
    gate.open(0, flight)
    timer = threading.Timer(BRIEF_S, word.fill, [flight.number])
    timer.start()
    assert gate.wait(0, SOON_S) == 0
    timer.join()
    assert ("hold", 99, word.ctypes.data, flight.number, 0) in device.log


def test_a_layer_waits_for_its_part_of_what_was_under_way_and_for_what_came_later(device, mover, batch, monkeypatch):
    gate = gate_of(device)
    word = words_at(mover._arm(Direction.LOCAL).lane.tally.address, 1)
    (series,) = mover.submit_all([Series(batch, np.zeros((2, 2), np.int64), (0, 1))])
    late = mover.submit(batch)
    late.wave.wait(SOON_S)
    for flight in (series, late):
        not_learned_of(flight)
    word[0] = -1
    gate.arm_behind({1: 1}, [({0: 0, 1: 1}, series)])
    with pytest.raises(DeadlineExceeded):
        gate.wait(1, BRIEF_S)
    gate.open(1, late)
    device.log.clear()
    monkeypatch.setattr(device, "_until", lambda *_: None)
    for layer, wanted in (0, [series.part(0)]), (1, [series.part(1), late]), (2, []):
        gate.wait(layer, SOON_S)
        assert sorted(held_by(device)) == [flight.number for flight in wanted]
        device.log.clear()
    gate.reset()
    gate.wait(1, SOON_S)
    assert not held_by(device)


@pytest.mark.parametrize("make", [CpuGate, lambda: gate_of(HostDevice())])
def test_gates_that_are_armed_behind_flights_of_the_host_open_as_these_end(make):
    gate, flight = make(), HostFlight()
    gate.arm_behind({}, [({0: 0, 1: 1}, flight)])
    with pytest.raises(DeadlineExceeded):
        gate.wait(1, BRIEF_S)
    flight.land()
    assert gate.wait(0, SOON_S) == gate.wait(1, SOON_S) == 0


def test_nothing_waits_for_a_copy_that_has_moved(device, mover, batch):
    gate = gate_of(device)
    gate.arm({0: 1})
    flight = mover.submit(batch)
    gate.open(0, flight)
    flight.wait(SOON_S)
    gate.wait(0, SOON_S)
    assert not held_by(device)


def test_what_a_closed_mover_has_moved_is_not_looked_for_in_memory_that_it_has_given_back(device, batch, monkeypatch):
    mover, gate = CudaMover(device, None, plain_issue(device.calls, (0, 0)), lambda: 1), gate_of(device)
    gate.arm({0: 1})
    gate.open(0, flight := mover.submit(batch))
    mover.close(SOON_S)
    looked = []
    monkeypatch.setattr(Tally, "reached", lambda *_: bool(looked.append(1)))
    monkeypatch.setattr(Tally, "handed", lambda *_: bool(looked.append(1)))
    assert gate.wait(0, SOON_S) == 0
    assert not moving(flight)
    assert looked == []


def test_a_copy_that_is_not_issued_yet_blocks_the_caller_until_its_deadline(device, mover, batch):
    gate, arrival = gate_of(device), HostFlight()
    gate.arm({0: 1})
    gate.open(0, mover.submit(batch, after=[arrival]))
    with pytest.raises(DeadlineExceeded, match="0"):
        gate.wait(0, BRIEF_S)
    with pytest.raises(BadTransition):
        gate.arm({0: 1})
    timer = threading.Timer(0.1, arrival.land)
    timer.start()
    assert 0.02 < gate.wait(0, SOON_S) < SOON_S
    timer.join()


def test_reset_lets_a_caller_through_that_waits_for_a_copy_to_be_issued(device, mover, batch):
    gate, arrival = gate_of(device), HostFlight()
    gate.arm({0: 1})
    gate.open(0, mover.submit(batch, after=[arrival]))
    timer = threading.Timer(BRIEF_S, gate.reset)
    timer.start()
    gate.wait(0, SOON_S)
    timer.join()
    assert not any(entry[:2] == ("wait", 99) for entry in device.log)
    arrival.land()


def test_flags_are_set_by_the_device_or_by_the_last_flight(device, mover, batch):
    gate = FlagGate(device, 2)
    arrivals = [HostFlight(), HostFlight()]
    gate.arm({0: 2, 1: 1})
    flags = [gate._flags[layer] for layer in range(2)]
    assert flags == [0, 0]
    mover.submit_all([batch], flags=[gate.flag(1)])
    (behind,) = mover.submit_all([batch], behind=[gate.flag(1)])
    behind.wait(SOON_S)
    assert gate._flags.tolist() == [0, 1]
    for arrival in arrivals:
        gate.open(0, arrival)
    arrivals[0].land()
    assert gate._flags.tolist() == [0, 1]
    arrivals[1].land()
    assert gate._flags.tolist() == [1, 1]
    gate.reset()
    gate.close()


def test_a_flight_that_ends_late_sets_no_flag_in_memory_that_was_given_back(device):
    gate, flight = FlagGate(device, 1), HostFlight()
    words = device.memory[gate.flag(0)][2]
    gate.arm({0: 1})
    gate.open(0, flight)
    gate.close()
    before = words.tobytes()
    flight.land()
    gate.reset()
    assert words.tobytes() == before


class Watched(dict):
    """What a gate keeps, as another thread sees it: `changed` is called behind each change, `looked` before a look."""

    def __init__(self, values, changed=lambda: None, looked=lambda: None):
        super().__init__(values)
        self._changed, self._looked = changed, looked

    def __contains__(self, layer):
        self._looked()
        return super().__contains__(layer)

    def __setitem__(self, layer, left):
        super().__setitem__(layer, left)
        self._changed()

    def pop(self, *key):
        found = super().pop(*key)
        self._changed()
        return found

    def __delitem__(self, layer):
        super().__delitem__(layer)
        self._changed()


def test_at_any_time_what_a_gate_misses_and_what_has_come_make_up_all(device, mover, batch):
    """A caller looks without a lock."""
    gate, seen = gate_of(device), []
    gate.arm({0: 3})
    gate._missing = Watched(
        gate._missing, changed=lambda: seen.append((dict(gate._missing).get(0, 0), len(gate._flights.get(0, ()))))
    )
    gate.open_all([(0, mover.submit(batch)) for _ in range(3)])
    assert seen == [(2, 1), (1, 2), (0, 3)]


def test_a_gate_that_opens_while_a_caller_looks_at_it_is_not_passed_without_its_flight(
    device, mover, batch, monkeypatch
):
    gate, flight = gate_of(device), mover.submit(batch)
    gate.arm({0: 1})
    flight.wave.wait(SOON_S)
    not_learned_of(flight)
    words_at(mover._arm(Direction.LOCAL).lane.tally.address, 1)[0] = -1
    opens = iter([lambda: gate.open(0, flight)])
    gate._missing = Watched(gate._missing, looked=lambda: next(opens, lambda: None)())
    monkeypatch.setattr(device, "_until", lambda *_: None)
    gate.wait(0, SOON_S)
    assert held_by(device) == [flight.number]


@pytest.fixture
def tally(device):
    tally = Tally(device.host_memory(TALLY_BYTES), device.calls.ring)
    yield tally
    tally.close()


@pytest.fixture
def copied(device, tally):
    """(a flight in a lane's queue, what hands it over)."""
    wave = Wave(device, tally, 1, Event(0, lambda _: None))
    wave.queue()
    program, loop = Program(), plain_issue(device.calls, (0, 0)).run
    program.copies(Series(pieces_of()), range(1), 1, batched=True, tally=tally.address)
    return CudaFlight(wave, [0]), lambda: loop(program.table(), np.zeros(0, np.int64), wave.errors, wave.first)


def test_a_caller_launches_nothing_behind_a_copy_that_the_device_has_not_been_handed(device, copied):
    """Launches that fill a device's queue keep its driver to themselves, so the copy would never be handed over."""
    gate, (flight, hand_over) = gate_of(device), copied
    gate.arm({0: 1})
    gate.open(0, flight)
    with pytest.raises(DeadlineExceeded, match="layer 0"):
        gate.wait(0, BRIEF_S)
    timer = threading.Timer(BRIEF_S, hand_over)
    timer.start()
    assert BRIEF_S / 2 < gate.wait(0, SOON_S) < SOON_S
    timer.join()
    assert not held_by(device), "the device has counted it"


def test_a_caller_that_waits_for_a_part_has_its_whole_batch_handed_over_without_a_pace(device, tally, monkeypatch):
    gate, wave = gate_of(device), Wave(device, tally, 5, Event(0, lambda _: None))
    batch = CudaFlight(wave, [0, 2, 3])
    monkeypatch.setattr(device, "_until", lambda *_: None)
    wave.queue()
    gate.arm_behind({}, [({0: 0, 1: 1, 2: 2}, batch)])
    tally.passed_over(wave.number(0))
    gate.wait(0, SOON_S)
    assert not tally.hurries(wave.number(0)), "nobody had to wait"
    with pytest.raises(DeadlineExceeded, match="layer 1"):
        gate.wait(1, BRIEF_S)
    assert [tally.hurries(wave.number(place)) for place in range(5)] == [True, True, True, True, False]


def test_a_batch_that_fails_while_a_caller_waits_for_its_number_hurries_no_other(device, tally):
    wave = Wave(device, tally, 5, Event(0, lambda _: None))

    def fails():
        wave.fail(ConnectionError("gone"))
        wave.issued.set()
        wave.queued.set()

    timer = threading.Timer(BRIEF_S, fails)
    timer.start()
    assert CudaFlight(wave, [4]).handed(SOON_S)
    timer.join()
    assert not any(tally.hurries(number) for number in range(1, 6))


@pytest.mark.parametrize("hurried", [(), (0,), (3, 9)])
def test_what_was_hurried_long_ago_hurries_nothing_that_comes_later(tally, hurried):
    """However many batches a lane counts meanwhile."""
    last, count = 0, 1 << 29
    for wave in range(24):
        assert tally.queue(count) == last + 1
        assert not tally.hurries((last + 1) & 0xFFFFFFFF)
        last += count
        if wave in hurried:
            tally.hurry(last & 0xFFFFFFFF)
        assert tally.hurries(last & 0xFFFFFFFF) == (wave in hurried)
        tally.passed_over(last & 0xFFFFFFFF)


def test_what_was_handed_over_long_ago_holds_no_caller_up(copied, tally):
    flight, hand_over = copied
    for _ in range(100):
        hand_over()
    assert flight.handed(0)
    assert tally.handed(flight.number - 1, 0)
    assert not tally.handed(flight.number + 1, BRIEF_S)


@given(st.lists(st.sampled_from(["hand over", "wait"]), max_size=12), st.sampled_from([0, 0x7FFFFFFE, 0xFFFFFFFD]))
def test_a_batch_has_been_handed_over_once_as_many_have(steps, start):
    device = HostDevice()
    tally, handed = Tally(device.host_memory(TALLY_BYTES), device.calls.ring), 0
    tally.passed_over(start)
    for step in steps:
        if step == "hand over":
            handed += 1
            tally.passed_over((start + handed) & 0xFFFFFFFF)
        for ahead in (0, 1):
            assert tally.handed((start + handed + ahead) & 0xFFFFFFFF, 0) == (ahead == 0)
    tally.close()


def test_a_copy_that_will_never_be_handed_over_lets_its_caller_through(device, mover, batch):
    gate, arrival = gate_of(device), HostFlight()
    gate.arm({0: 1})
    gate.open(0, mover.submit(batch, after=[arrival]))
    timer = threading.Timer(BRIEF_S, arrival.fail, [ConnectionError("gone")])
    timer.start()
    assert gate.wait(0, SOON_S) < SOON_S
    timer.join()


def test_no_stream_waits_for_a_copy_that_fails_before_it_has_a_number_while_a_caller_looks_at_it(device, tally):
    """The number that it would have had by its place alone is another's, or nobody's."""
    gate, wave = gate_of(device), Wave(device, tally, 2, Event(0, lambda _: None))

    def fails():
        wave.fail(ConnectionError("gone"))
        wave.issued.set()
        wave.queued.set()
        return True

    gate.arm_behind({}, [({0: 1}, CudaFlight(wave, [0, 1]))])
    wave.queued.is_set = lambda: Latch.is_set(wave.queued) or fails()
    gate.wait(0, SOON_S)
    assert isinstance(wave.error, ConnectionError)
    assert not held_by(device)


def test_a_copy_that_a_lost_device_will_never_be_handed_lets_its_caller_through(device, mover, batch):
    gate, arrival = gate_of(device), HostFlight()
    gate.arm({0: 1})
    gate.open(0, mover.submit(batch, after=[arrival]))
    device.failing["wait"] = 700
    arrival.fail(ConnectionError("gone"))
    assert gate.wait(0, SOON_S) < SOON_S
    assert not held_by(device)


def test_a_copy_that_the_device_will_never_count_holds_no_forward_up(device, copied):
    gate, (flight, hand_over) = gate_of(device), copied
    gate.arm({0: 1})
    gate.open(0, flight)
    device.failing["write"] = 1
    hand_over()
    assert not flight.handed(0)
    flight.wave.issued.set()
    gate.wait(0, SOON_S)
    assert not held_by(device)


def test_a_bell_is_heard_by_one_of_those_who_listen_and_harms_none(device):
    bell, heard = Bell(device.calls.ring, sleeping=False), []
    listeners = [threading.Thread(target=lambda: heard.append(bell.heard(5 * BRIEF_S))) for _ in range(3)]
    for listener in listeners:
        listener.start()
    time.sleep(BRIEF_S)
    bell.ring()
    for listener in listeners:
        listener.join()
    assert len(heard) == 3
    assert any(heard)
    assert not bell.heard(0)
    bell.close()


def test_who_listens_to_a_bell_as_it_is_given_back_hears_nothing_and_comes_to_no_harm(device, monkeypatch):
    bell, closed = Bell(device.calls.ring, sleeping=False), Bell(device.calls.ring, sleeping=False)
    closed.close()
    assert not closed.heard(SOON_S)
    poll = cuda_bell.select.poll

    def closes():
        asked = poll()

        def rung(_ms):
            bell.ring()
            heard = asked.poll(0)
            bell.close()
            return heard

        return SimpleNamespace(register=asked.register, poll=rung)

    monkeypatch.setattr(cuda_bell, "select", SimpleNamespace(poll=closes, POLLIN=cuda_bell.select.POLLIN))
    assert not bell.heard(SOON_S)


def test_a_bell_that_was_given_back_rings_no_file_that_has_its_number_by_now(device):
    bell = Bell(device.calls.ring, sleeping=False)
    number = bell.file
    bell.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    os.dup2(other, number)
    try:
        bell.ring()
        with pytest.raises(BlockingIOError):
            os.read(other, 8)
    finally:
        for file in {other, number}:
            os.close(file)


def test_a_system_without_another_file_says_what_to_raise(device):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(Refused, match="limit of open files"):
            Bell(device.calls.ring, sleeping=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
