"""A mover behind a model of a link: the same copies, no faster than a given rate.

For measuring overlap on a machine whose memory is faster than the link of interest. Whatever is reported from it has to
say that it was paced. Does not know how the copies are done.
"""

import time
from collections.abc import Sequence

from layercast.link import Link
from layercast.move.base import Flight, Mover, MoverOver
from layercast.move.flights import HostFlight
from layercast.move.line import Line
from layercast.plan.pieces import Pieces


class PacedMover(MoverOver):
    """Another mover, owned by this one, at most `link_gbps` gigabits (of 125e6 bytes) a second."""

    def __init__(self, mover: Mover, link_gbps: float) -> None:
        super().__init__(mover)
        self._link = Link(link_gbps)
        self._line = Line("layercast-link")

    def submit(self, pieces: Pieces, *, after: Sequence[Flight] = (), keep: Sequence[object] = ()) -> HostFlight:
        """Copy `pieces`; the flight lands when the link would have carried them. Raises Refused once closed."""
        flight = HostFlight()

        def run(ready_at: float) -> None:
            copied = self._mover.submit(pieces, after=after, keep=keep)
            self._link.carry(pieces.nbytes, ready_at)
            copied.then(lambda _: flight.land() if copied.error is None else flight.fail(copied.error))

        self._line.submit(flight, run, after, keep)
        return flight

    @property
    def halted(self) -> str:
        """Why a thread has ended by itself."""
        return self._line.halted or super().halted

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted, end both threads. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        try:
            self._line.close(timeout_s)
        finally:
            self._mover.close(max(0.0, deadline - time.monotonic()))
