"""What an issuer hands to a device at a time."""

import pytest

from layercast.flow.issue import Batch, Issuer
from layercast.move.base import MoverOver, Waits
from layercast.move.cpu import CpuMover
from layercast.move.flights import HostFlight
from layercast.observe.timeline import SpanKind
from layercast.plan.pieces import Pieces

MIB = 1 << 20


class Device(MoverOver):
    """Takes whole steps, and ends them when the test says so, oldest first."""

    whole_steps = True

    def __init__(self):
        super().__init__(CpuMover())
        self.waves, self.waits = [], []

    def submit(self, pieces, *, after=(), keep=()):
        raise AssertionError("a device is handed many at a time")

    def submit_all(self, batches, *, after=(), keep=(), waits=Waits.IDLE):
        self.waits.append(waits)
        self.waves.append([HostFlight() for _ in batches])
        return self.waves[-1]

    def end_first(self):
        for flight in self.waves.pop(0):
            flight.land()

    def close(self, timeout_s):
        self._mover.close(timeout_s)


class Followed:
    kind = SpanKind.LOAD

    def __init__(self):
        self.over = []

    def submitted(self, sent, since_s): ...

    def ended(self, over):
        self.over += [batch.layers[0] for batch, _, _ in over]


@pytest.fixture
def device():
    device = Device()
    yield device
    device.close(5)


def batches(run, count, nbytes, owner="load"):
    return [Batch(run, owner, (layer,), Pieces.join([]), nbytes=nbytes) for layer in range(count)]


def test_what_a_forward_waits_for_goes_to_a_device_in_one_go(device):
    run, issuer = Followed(), Issuer(device, depth=2)
    issuer.add_loads(batches(run, 32, 64 * MIB))
    assert [len(wave) for wave in device.waves] == [32]
    device.end_first()
    assert run.over == list(range(32))
    issuer.wait_idle(1)


def test_saves_go_in_one_go_and_not_in_the_background(device):
    run, issuer = Followed(), Issuer(device, depth=2)
    issuer.add_saves(batches(run, 32, MIB, "save"))
    assert [len(wave) for wave in device.waves] == [32]
    assert Waits.NOBODY not in device.waits
    device.end_first()
    issuer.wait_idle(1)


def test_in_the_background_a_device_is_handed_load_by_load_and_told_that_they_stand_aside(device):
    """Were loads to take turns, all would come as late as the last; were parts handed over one by one, a thread would
    take the interpreter from the forward's for each."""
    runs, issuer = [Followed() for _ in range(3)], Issuer(device, depth=2)
    for nth, run in enumerate(runs):
        issuer.add_loads(batches(run, 8, 32 * MIB, f"load-{nth}"), waits=Waits.NOBODY)
    issuer.add_loads(batches(runs[0], 4, MIB, "another"))
    assert [len(wave) for wave in device.waves] == [8, 8, 8, 4]
    assert device.waits == [Waits.NOBODY] * 3 + [Waits.BUSY]
    for nth, run in enumerate(runs):
        assert [len(run.over) for run in runs] == [8] * nth + [0] * (3 - nth)
        device.end_first()
        assert run.over == list(range(8))
    device.end_first()
    issuer.wait_idle(1)


def test_batches_of_a_wave_that_end_later_than_its_last_are_told_of_when_they_end(device):
    run, issuer = Followed(), Issuer(device, depth=2)
    issuer.add_loads(batches(run, 3, MIB))
    (wave,) = device.waves
    wave[2].land()
    assert run.over == [2]
    wave[0].land()
    wave[1].land()
    assert sorted(run.over) == [0, 1, 2]
    issuer.wait_idle(1)
