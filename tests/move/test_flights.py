import threading

import pytest

from layercast.errors import BadTransition, DeadlineExceeded, Missing
from layercast.landing import Latch
from layercast.move.flights import HostDigestFlight, HostFlight, first_error, landed


def test_a_flight_ends_once():
    for end in (HostFlight.land, lambda flight: flight.fail(Missing("gone"))):
        flight = landed()
        with pytest.raises(BadTransition):
            end(flight)
        assert flight.error is None


def test_a_flight_under_way_has_no_error_and_waiting_for_it_ends_by_the_deadline():
    flight = HostFlight()
    assert not flight.done
    assert flight.error is None
    with pytest.raises(DeadlineExceeded):
        flight.wait(0.01)


def test_every_waiter_gets_the_error():
    flight, error, caught = HostFlight(), Missing("gone"), []

    def wait():
        try:
            flight.wait(10)
        except Missing as found:
            caught.append(found)

    waiters = [threading.Thread(target=wait) for _ in range(8)]
    for waiter in waiters:
        waiter.start()
    flight.fail(error)
    for waiter in waiters:
        waiter.join(10)
    assert caught == [error] * 8


def test_a_callback_that_raises_is_logged_with_its_cause(caplog):
    flight = HostFlight()
    flight.then(lambda _: 1 / 0)
    flight.land()
    assert "ZeroDivisionError" in caplog.text


def test_callbacks_added_while_it_ends_run_once_each():
    for _ in range(200):
        flight, seen = HostFlight(), []
        ender = threading.Thread(target=flight.land)
        ender.start()
        for i in range(20):
            flight.then(lambda _, seen=seen, i=i: seen.append(i))
        ender.join(10)
        assert sorted(seen) == list(range(20))


def test_digests_can_not_be_read_before_landing():
    with pytest.raises(BadTransition):
        _ = HostDigestFlight().digests


def test_the_first_error_is_that_of_the_first_failed_flight():
    lost = HostFlight()
    lost.fail(Missing("gone"))
    assert first_error([]) is None
    assert first_error([landed(), HostFlight()]) is None
    assert isinstance(first_error([landed(), lost]), Missing)


@pytest.mark.parametrize("early", [True, False])
def test_every_thread_that_waits_for_a_latch_goes_on_once_it_is_set(early):
    latch, gone, waiting = Latch(), [], 8
    assert not latch.is_set()
    assert not latch.wait(0.0)
    threads = [threading.Thread(target=lambda: gone.append(latch.wait(10.0))) for _ in range(waiting)]
    for thread in threads[: waiting if early else 0]:
        thread.start()
    latch.set()
    latch.set()
    for thread in threads[waiting if early else 0 :]:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert gone == [True] * waiting
    assert latch.is_set()
