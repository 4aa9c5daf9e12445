"""Work that ends once, well or not, and those who wait for it.

The one implementation behind flights of host movers and tickets of transports. Does not know what the work is.
"""

import logging
import threading
from collections.abc import Callable

from layercast.errors import BadTransition, DeadlineExceeded

_log = logging.getLogger("layercast")


class Latch:
    """What is set once. It makes a `threading.Event`, which costs microseconds, for the first who waits."""

    _set = False
    _event: threading.Event | None = None

    def is_set(self) -> bool:
        """Whether it is. Never blocks."""
        return self._set

    def set(self) -> None:
        """Set it. Again is well."""
        self._set = True
        with _waiting:
            event = self._event
        if event is not None:
            event.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is set; waits up to `timeout_s` seconds."""
        if self._set:
            return True
        with _waiting:
            self._event = event = self._event or threading.Event()
        return self._set or event.wait(timeout_s)


_waiting = threading.Lock()
"""Held while a latch's event is made or looked for: who sets it must not miss that of who has just seen it unset."""


class Landing:
    """The end of one piece of work, which whoever does the work brings about by `land` or `fail`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = Latch()
        self._error: BaseException | None = None
        self._calls: list[Callable[[Landing], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        return self._over.is_set()

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
        if not self._over.wait(timeout_s):
            raise DeadlineExceeded(f"not ended within {timeout_s:g} s; it may still land later")
        if self._error is not None:
            raise self._error

    def then(self, call: "Callable[[Landing], None]") -> None:
        """Call `call(self)` once it has ended: at once if it has, else on the thread that ends it. Must not block."""
        with self._lock:
            if not self._over.is_set():
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
            if self._over.is_set():
                raise BadTransition("this has ended already; whoever does the work ends it once")
            self._error = error
            calls, self._calls = self._calls, []
            self._over.set()
        for call in calls:
            try:
                call(self)
            except Exception:  # noqa: BLE001  a caller's mistake must not end the thread that serves everyone
                _log.exception("a callback raised; the work it was told of has ended as it should")
