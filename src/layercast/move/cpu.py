"""The mover of host memory: one thread that copies by raw addresses.

Does not know what the bytes mean, nor how pieces are copied fast (see raw).
"""

from collections.abc import Callable, Sequence

from layercast.move.base import DigestFlight, Flight, Mover
from layercast.move.flights import HostDigestFlight, HostFlight, landed
from layercast.move.line import Line
from layercast.move.raw import copy, digests_of
from layercast.plan.pieces import DigestRanges, Pieces


class CpuMover(Mover):
    """Copies between places in this process's memory, in order, without staging."""

    def __init__(self) -> None:
        self._line = Line("layercast-move")
        self._landed = landed()

    def submit(self, pieces: Pieces, *, after: Sequence[Flight] = (), keep: Sequence[object] = ()) -> HostFlight:
        """Copy `pieces` once every flight in `after` has landed. Raises Refused once closed."""
        flight = HostFlight()

        def run(_ready_at: float) -> None:
            copy(pieces)
            flight.land()

        self._line.submit(flight, run, after, keep)
        return flight

    def digest(self, ranges: DigestRanges, *, after: Sequence[Flight] = ()) -> DigestFlight:
        """One 64-bit XXH3 a row, once every flight in `after` has landed. Raises Refused once closed."""
        flight = HostDigestFlight()
        self._line.submit(flight, lambda _ready_at: flight.land_with(digests_of(ranges)), after)
        return flight

    def mark(self) -> Flight:
        """A flight that has landed: the caller's writes are done when it calls."""
        return self._landed

    def aside(self, call: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        """On the thread that copies, between copies."""
        self._line.aside(call, then)

    @property
    def staging_bytes(self) -> int:
        """0: every copy goes straight from source to target."""
        return 0

    @property
    def halted(self) -> str:
        """Whether its thread has ended by itself."""
        return self._line.halted

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted and end the thread. Raises DeadlineExceeded."""
        self._line.close(timeout_s)
