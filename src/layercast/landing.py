"""Work that ends once, well or not, and those who wait for it.

The one implementation behind flights of host movers and tickets of transports. Does not know what the work is.
"""

import logging
import threading
from collections.abc import Callable

from layercast.errors import BadTransition, DeadlineExceeded

_log = logging.getLogger("layercast")


class Landing:
    """The end of one piece of work, which whoever does the work brings about by `land` or `fail`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._over: threading.Event | None = None
        """Made by the first who waits: of a step's many, hardly one is waited for on the host."""
        self._error: BaseException | None = None
        self._calls: list[Callable[[Landing], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        return self._done

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it has ended; None if it landed or is still under way."""
        return self._error

    def promised(self, timeout_s: float) -> bool:
        """Never: on a host, whether it lands is known when it has ended. A device's flight says more."""
        return False

    def part(self, nth: int) -> "Landing":
        """Itself, as on a host all parts end together."""
        return self

    def wait(self, timeout_s: float) -> None:
        """Block until it has landed. Raises its error, or DeadlineExceeded after `timeout_s` seconds."""
        with self._lock:
            if not self._done and self._over is None:
                self._over = threading.Event()
        if not self._done and self._over is not None and not self._over.wait(timeout_s):
            raise DeadlineExceeded(f"not ended within {timeout_s:g} s; it may still land later")
        if self._error is not None:
            raise self._error

    def then(self, call: "Callable[[Landing], None]") -> None:
        """Call `call(self)` once it has ended: at once if it has, else on the thread that ends it. Must not block."""
        with self._lock:
            if not self._done:
                self._calls.append(call)
                return
        call(self)

    def land(self) -> None:
        """End it well: every byte is in place. Raises BadTransition if it has ended."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """End it with `error`. Raises BadTransition if it has ended."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                raise BadTransition("this has ended already; whoever does the work ends it once")
            self._error = error
            self._done = True
            calls, self._calls = self._calls, []
            if self._over is not None:
                self._over.set()
        for call in calls:
            try:
                call(self)
            except Exception:  # noqa: BLE001  a caller's mistake must not end the thread that serves everyone
                _log.exception("a callback raised; the work it was told of has ended as it should")
