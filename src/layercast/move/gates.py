"""The gate of a CPU forward: the thread that computes blocks until its layer is in place.

Does not know what the flights copy.
"""

import threading
import time
from collections.abc import Mapping

from layercast.errors import BadTransition, DeadlineExceeded
from layercast.move.base import Flight, Gate


class CpuGate(Gate):
    """One gate a layer, as counts of flights still missing, under one condition."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._missing: dict[int, int] = {}
        self._epoch = 0

    def arm(self, flights: Mapping[int, int]) -> None:
        """Close each layer's gate until that many flights have ended. Raises BadTransition while one is closed."""
        with self._changed:
            closed = sorted(self._missing)
            if closed:
                raise BadTransition(f"the gates of layers {closed} are still closed; wait for them or reset first")
            self._epoch += 1
            self._missing = {layer: count for layer, count in flights.items() if count > 0}

    def open(self, layer: int, after: Flight) -> None:
        """Count `after` against the layer's gate once it has ended, well or not. Returns at once."""
        epoch = self._epoch
        after.then(lambda _: self._count(epoch, layer))

    def wait(self, layer: int, timeout_s: float) -> float:
        """Block until the layer's gate is open; seconds blocked. Raises DeadlineExceeded."""
        if layer not in self._missing:
            return 0.0
        with self._changed:
            epoch, start = self._epoch, time.monotonic()
            if not self._changed.wait_for(lambda: epoch != self._epoch or layer not in self._missing, timeout_s):
                raise DeadlineExceeded(f"layer {layer} lacks {self._missing[layer]} copies after {timeout_s:g} s")
            return time.monotonic() - start

    def is_open(self, layer: int) -> bool:
        """Whether nothing is missing for the layer. Never blocks."""
        with self._changed:
            return layer not in self._missing

    def reset(self) -> None:
        """Open every gate and forget what was armed; late flights of the old arming change nothing."""
        with self._changed:
            self._epoch += 1
            self._missing = {}
            self._changed.notify_all()

    def _count(self, epoch: int, layer: int) -> None:
        with self._changed:
            if epoch != self._epoch or layer not in self._missing:
                return
            self._missing[layer] -= 1
            if self._missing[layer] == 0:
                del self._missing[layer]
                self._changed.notify_all()
