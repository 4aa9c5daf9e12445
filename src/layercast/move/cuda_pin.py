"""Pins a slab in the background, slice by slice from its start, so that it can be used before all of it is pinned.

What is not pinned yet moves all the same, by way of the driver's own buffers and at a fraction of the speed.
Does not know what lies in the memory.
"""

import logging
import threading
import time

from layercast.errors import DeadlineExceeded, LayercastError
from layercast.move.cuda_driver import Driver

SLICE_BYTES = 256 << 20
_log = logging.getLogger("layercast")


class Pinning:
    """Page-locks [address, address + nbytes) from construction on; `close` undoes it.

    slice_bytes: memory pinned in one call; a multiple of the page size.
    """

    def __init__(self, driver: Driver, address: int, nbytes: int, slice_bytes: int = SLICE_BYTES) -> None:
        self._driver = driver
        self._slices = [(address + first, min(slice_bytes, nbytes - first)) for first in range(0, nbytes, slice_bytes)]
        self._pinned: list[int] = []
        self._stop = threading.Event()
        self.pinned_bytes = 0
        self.refusal = ""
        """Why it stopped short of the end, and what to do; empty if it did not."""
        self._thread = threading.Thread(target=self._pin, name="layercast-cuda-pin", daemon=True)
        self._thread.start()

    @property
    def cuts(self) -> list[int]:
        """Where slices meet: no copy may cross these (see `CudaMover.cut_at`)."""
        return [address for address, _ in self._slices[1:]]

    def wait(self, timeout_s: float) -> None:
        """Block until all is pinned or refused. Raises DeadlineExceeded."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"pinning: {self.pinned_bytes} bytes after {timeout_s:g} s; it goes on")

    def close(self, timeout_s: float) -> None:
        """Stop, and unpin what was pinned. No copy may be under way. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        self.wait(max(0.0, deadline - time.monotonic()))
        self._driver.bind()
        while self._pinned:
            self._driver.unpin(self._pinned.pop())
        self.pinned_bytes = 0

    def _pin(self) -> None:
        try:
            self._driver.bind()
            for address, nbytes in self._slices:
                if self._stop.is_set():
                    return
                self._driver.pin(address, nbytes)
                self._pinned.append(address)
                self.pinned_bytes += nbytes
        except LayercastError as error:
            total = sum(nbytes for _, nbytes in self._slices)
            self.refusal = (
                f"{self.pinned_bytes} of {total} bytes of host memory are pinned, then the system refused ({error}); "
                "the rest works, slowly: lower host_bytes, or raise the limit on locked memory (ulimit -l)"
            )
            _log.warning("%s", self.refusal)
