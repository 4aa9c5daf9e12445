"""What an issuer hands to a device at a time."""

import pytest

from layercast.flow.issue import AHEAD_BYTES, Batch, Issuer
from layercast.move.base import MoverOver
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
        self.waves = []

    def submit(self, pieces, *, after=(), keep=()):
        raise AssertionError("a device is handed many at a time")

    def submit_all(self, batches, *, after=(), keep=()):
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


@pytest.mark.parametrize(("mib", "waves"), [(4, [16, 16]), (32, [2, 2]), (64, [1, 1]), (100, [1, 1]), (1000, [1, 1])])
def test_in_the_background_a_device_has_two_parts_queued_and_is_handed_the_next_as_one_ends(device, mib, waves):
    run, issuer, count = Followed(), Issuer(device, depth=2), 40
    issuer.add_loads(batches(run, count, mib * MIB), background=True)
    assert [len(wave) for wave in device.waves] == waves
    while device.waves:
        device.end_first()
        queued = sum(len(wave) for wave in device.waves) * mib * MIB
        left = (count - len(run.over)) * mib * MIB
        assert queued >= min(left, AHEAD_BYTES // 2)
        assert queued <= max(AHEAD_BYTES + mib * MIB, 2 * mib * MIB)
    assert run.over == list(range(count))
    issuer.wait_idle(1)


def test_a_newcomers_forward_waits_for_no_more_than_is_queued_of_the_background(device):
    slow, quick, issuer = Followed(), Followed(), Issuer(device, depth=2)
    issuer.add_loads(batches(slow, 40, 32 * MIB), background=True)
    issuer.add_loads(batches(quick, 3, 32 * MIB))
    assert [len(wave) for wave in device.waves] == [2, 2, 3]
    while device.waves:
        device.end_first()
        if quick.over:
            assert len(slow.over) <= 2 * AHEAD_BYTES // (32 * MIB)
            break
    while device.waves:
        device.end_first()
    issuer.wait_idle(1)


def test_loads_in_the_background_end_one_after_another(device):
    runs, issuer = [Followed() for _ in range(3)], Issuer(device, depth=2)
    for nth, run in enumerate(runs):
        issuer.add_loads(batches(run, 8, 32 * MIB, f"load-{nth}"), background=True)
    while device.waves:
        device.end_first()
        begun = [bool(run.over) for run in runs]
        assert all(len(run.over) == 8 for run, later in zip(runs, begun[1:], strict=False) if later)
    assert all(run.over == list(range(8)) for run in runs)
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
