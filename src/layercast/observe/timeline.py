"""A recorder of what ran when: spans of compute and copies, by layer.

Callers bring their own clock (seconds, the same one for all that is drawn together; on one machine
`time.monotonic` agrees between processes). Does not know pictures, requests' meaning or threads.
"""

from collections import deque
from enum import StrEnum

import msgspec


class SpanKind(StrEnum):
    """What took the time."""

    COMPUTE = "compute"
    REMOTE = "remote"
    """Compute of another process."""
    LOAD = "load"
    SAVE = "save"
    PUSH = "push"
    WAIT = "wait"


class Span(msgspec.Struct, frozen=True):
    """One stretch of work on one layer, [start_s, end_s) in seconds. nbytes: what it moved, 0 for compute."""

    kind: SpanKind
    layer: int
    start_s: float
    end_s: float
    request: str = ""
    nbytes: int = 0


class Timeline:
    """The newest `limit` spans. Any thread may record; nothing locks, because a bounded deque's append is atomic.

    limit 0 is a recorder that is off: `record` returns at once and keeps nothing.
    """

    __slots__ = ("_limit", "_spans")

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._spans: deque[Span] = deque(maxlen=limit)

    @property
    def on(self) -> bool:
        """Whether spans are kept, for callers that would otherwise read clocks in vain."""
        return self._limit > 0

    def record(
        self, kind: SpanKind, layer: int, start_s: float, end_s: float, request: str = "", nbytes: int = 0
    ) -> None:
        """Keep one span; the oldest one goes when the limit is reached. Never blocks."""
        if self._limit:
            self._spans.append(Span(kind, layer, start_s, end_s, request, nbytes))

    def spans(self) -> tuple[Span, ...]:
        """The kept spans in order of their start."""
        return tuple(sorted(self._spans.copy(), key=lambda span: span.start_s))

    def clear(self) -> None:
        """Forget every span."""
        self._spans.clear()


OFF = Timeline(0)
"""A timeline that keeps nothing, for callers that were given none."""
