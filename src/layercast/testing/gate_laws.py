"""What every gate must do, as a test class: subclass it, give it a backend, and pytest runs the laws.

A device overrides `make_flight` (what opens its gates) and `holds` (whether its compute is held up).
"""

# ruff: noqa: D102  a law's name says what it holds

import threading

import pytest

from layercast.errors import BadTransition, DeadlineExceeded, Missing
from layercast.move.base import Gate
from layercast.move.flights import HostFlight, landed
from layercast.testing.memory import SOON_S
from layercast.testing.move_laws import BRIEF_S


class GateLaws:
    """Laws of `move.base.Gate`."""

    def make_gate(self) -> Gate:
        """A new gate, with nothing armed."""
        raise NotImplementedError

    def make_flight(self) -> HostFlight:
        """A flight that a law ends by hand."""
        return HostFlight()

    def holds(self, gate: Gate, layer: int) -> bool:
        """Whether the layer's gate keeps compute from running now."""
        try:
            gate.wait(layer, BRIEF_S)
        except DeadlineExceeded:
            return True
        return False

    @pytest.fixture
    def gate(self) -> Gate:
        """The gate under test."""
        return self.make_gate()

    def test_what_was_never_armed_is_open(self, gate: Gate) -> None:
        gate.arm({1: 0})
        assert gate.wait(0, SOON_S) == 0.0
        assert gate.wait(1, SOON_S) == 0.0

    def test_a_layer_opens_when_as_many_flights_ended_as_it_was_armed_with(self, gate: Gate) -> None:
        flights = [self.make_flight() for _ in range(3)]
        gate.arm({0: 2, 1: 1})
        gate.open(0, flights[0])
        gate.open(0, flights[1])
        gate.open(1, flights[2])
        flights[0].land()
        assert self.holds(gate, 0)
        flights[1].land()
        assert not self.holds(gate, 0)
        assert self.holds(gate, 1)
        flights[2].land()
        assert not self.holds(gate, 1)

    def test_a_failed_flight_opens_it_as_well(self, gate: Gate) -> None:
        flight = self.make_flight()
        gate.arm({0: 1})
        gate.open(0, flight)
        flight.fail(Missing("gone"))
        assert not self.holds(gate, 0)

    def test_a_flight_that_has_ended_already_counts_at_once(self, gate: Gate) -> None:
        gate.arm({0: 1})
        gate.open(0, landed())
        assert not self.holds(gate, 0)

    def test_waiting_ends_by_the_deadline_and_the_gate_stays_closed(self, gate: Gate) -> None:
        gate.arm({7: 1})
        with pytest.raises(DeadlineExceeded, match="7"):
            gate.wait(7, BRIEF_S)
        assert self.holds(gate, 7)
        gate.reset()

    def test_a_waiter_is_let_through_and_told_how_long_it_was_blocked(self, gate: Gate) -> None:
        flight = self.make_flight()
        gate.arm({0: 1})
        gate.open(0, flight)
        timer = threading.Timer(0.1, flight.land)
        timer.start()
        blocked = gate.wait(0, SOON_S)
        timer.join(SOON_S)
        assert 0.02 < blocked < SOON_S

    def test_arming_is_refused_while_a_layer_is_closed(self, gate: Gate) -> None:
        gate.arm({0: 1})
        with pytest.raises(BadTransition):
            gate.arm({1: 1})
        gate.open(0, landed())
        gate.arm({1: 1})
        assert self.holds(gate, 1)

    def test_reset_lets_every_waiter_through(self, gate: Gate) -> None:
        gate.arm({0: 1})
        timer = threading.Timer(BRIEF_S, gate.reset)
        timer.start()
        gate.wait(0, SOON_S)
        timer.join(SOON_S)
        assert not self.holds(gate, 0)

    def test_late_flights_of_an_old_arming_change_nothing(self, gate: Gate) -> None:
        late = self.make_flight()
        gate.arm({0: 1})
        gate.open(0, late)
        gate.reset()
        gate.arm({0: 1})
        late.land()
        assert self.holds(gate, 0)
        gate.open(0, landed())
        assert not self.holds(gate, 0)

    def test_more_flights_than_armed_change_nothing(self, gate: Gate) -> None:
        gate.arm({0: 1})
        for _ in range(3):
            gate.open(0, landed())
        assert not self.holds(gate, 0)
        gate.arm({0: 1})
        assert self.holds(gate, 0)
