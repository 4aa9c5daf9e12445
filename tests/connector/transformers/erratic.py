"""A mover that is late, fails, stalls and lets later copies overtake earlier ones, as its dice say."""

import random
import threading
import time

from layercast.errors import PeerLost
from layercast.move.base import Mover
from layercast.move.cpu import CpuMover
from layercast.move.flights import HostFlight
from layercast.move.line import Line


class ErraticMover(Mover):
    """Real copies on two threads; each waits for nothing, for a nap, or for a flight that fails.

    fail: share of copies that fail; nap: share that waits up to `nap_s` seconds; reorder: use both threads (only where
    nothing relies on the order of copies: batches without limits). `stall` holds back what is submitted from then on.
    """

    def __init__(self, seed, fail=0.0, nap=0.0, nap_s=0.0, reorder=False):
        self._dice, self._lock = random.Random(seed), threading.Lock()
        self._fail, self._nap, self._nap_s, self._reorder = fail, nap, nap_s, reorder
        self._movers, self._sleeper = (CpuMover(), CpuMover()), Line("erratic-naps")
        self._stalled_until = 0.0

    def stall(self, seconds):
        self._stalled_until = time.monotonic() + seconds

    def submit(self, pieces, *, after=(), keep=()):
        roll, which, nap = self._roll()
        before = HostFlight()
        stalled = max(0.0, self._stalled_until - time.monotonic())
        if roll < self._fail:
            before.fail(PeerLost("this copy fails, as the dice said"))
        elif stalled or roll < self._fail + self._nap:
            self._sleeper.submit(before, lambda _: (time.sleep(stalled + nap), before.land()))
        else:
            before.land()
        return self._movers[which].submit(pieces, after=(*after, before), keep=keep)

    def digest(self, ranges, *, after=()):
        return self._movers[self._roll()[1]].digest(ranges, after=after)

    def mark(self):
        return self._movers[0].mark()

    @property
    def staging_bytes(self):
        return 0

    def close(self, timeout_s):
        self._sleeper.close(timeout_s)
        for mover in self._movers:
            mover.close(timeout_s)

    def _roll(self):
        with self._lock:
            return (
                self._dice.random(),
                int(self._reorder and self._dice.random() < 0.5),
                self._dice.random() * self._nap_s,
            )
