import time

import numpy as np
import pytest

from layercast.errors import BadSetting
from layercast.move.cpu import CpuMover
from layercast.move.flights import HostFlight
from layercast.move.paced import PacedMover
from layercast.testing.move_laws import SOON_S, MoverLaws, pieces_of


class TestPacedMover(MoverLaws):
    def make_mover(self):
        return PacedMover(CpuMover(), 1000.0)


@pytest.fixture
def paced():
    mover = PacedMover(CpuMover(), 0.8)  # 1e8 bytes a second
    yield mover
    mover.close(SOON_S)


@pytest.fixture
def batch():
    """200,000 bytes: 2 ms of the link."""
    source, target = np.ones(200_000, np.uint8), np.zeros(200_000, np.uint8)
    yield pieces_of((source.ctypes.data, target.ctypes.data, 200_000))
    assert target.all()


def test_a_batch_lands_no_sooner_than_the_link_carries_it(paced, batch):
    started = time.monotonic()
    paced.submit(batch).wait(SOON_S)
    assert time.monotonic() - started >= 0.002


def test_many_batches_take_their_bytes_over_the_rate_however_late_each_sleep_ends(paced, batch, monkeypatch):
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds + 0.01 if seconds > 0 else 0))
    started = time.monotonic()
    flights = [paced.submit(batch) for _ in range(100)]
    landings = []
    for flight in flights:
        flight.wait(SOON_S)
        landings.append(time.monotonic() - started)
    assert all(at >= 0.002 * (i + 1) for i, at in enumerate(landings))
    assert landings[-1] < 0.9, "100 sleeps of 10 ms too long must not add up to 1.2 s"


def test_a_batch_that_waits_or_fails_holds_no_link(paced, batch):
    never, lost = HostFlight(), HostFlight()
    lost.fail(ValueError("gone"))
    parked = paced.submit(batch, after=[never])
    for _ in range(200):
        paced.submit(batch, after=[lost])
    started = time.monotonic()
    paced.submit(batch).wait(SOON_S)
    assert time.monotonic() - started < 0.2
    never.land()
    parked.wait(SOON_S)


def test_a_link_that_carries_nothing_or_everything_at_once_is_refused():
    mover = CpuMover()
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadSetting):
            PacedMover(mover, rate)
    mover.close(SOON_S)
