"""A model of a link: how long bytes have to wait so that no more than a given rate passes.

For measuring overlap on a machine whose memory or loopback is faster than the link of interest. Whatever is reported
from it has to say that it was paced. Does not know how the bytes are moved.
"""

import math
import threading
import time

from layercast.errors import BadSetting

BYTES_PER_GBIT = 125_000_000
_CHUNK_S = 0.001


class Link:
    """At most `gbps` gigabits (of 125e6 bytes) a second over all who share it."""

    def __init__(self, gbps: float) -> None:
        if not 0 < gbps < math.inf:
            raise BadSetting(f"link_gbps = {gbps}: a link carries more than 0 gigabits a second, not endlessly many")
        self._rate = gbps * BYTES_PER_GBIT
        self.chunk = max(1, int(self._rate * _CHUNK_S))
        """Bytes to send at a time so that they spread over time."""
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, nbytes: int, ready_at: float) -> None:
        """Sleep until the link would have carried that many bytes more, ready since `ready_at` (time.monotonic)."""
        with self._lock:
            # Counted from when the link could have begun, not from when this thread woke: lateness never adds up.
            self._free_at = due = max(self._free_at, ready_at) + nbytes / self._rate
        time.sleep(max(0.0, due - time.monotonic()))
