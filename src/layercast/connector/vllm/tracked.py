"""What the scheduler-side hooks remember of one request, from its first look-up to its end.

Does not know the pool or the engine's scheduler.
"""

from dataclasses import dataclass

from vllm.v1.request import Request

from layercast.control.scheduler import Match
from layercast.observe.receipts import MissReason


@dataclass(slots=True, eq=False)
class Tracked:
    """One live request.

    nameable: whether its tokens and extras can be named. saved: leading tokens whose saves have been ordered.
    loading: the load order whose outcome it awaits. failed: its load has failed, and it has not computed since.
    """

    request: Request
    nameable: bool
    load: bool
    save: bool
    saved: int = 0
    match: Match | None = None
    promised: int = 0
    asked_s: float | None = None
    """When it was first told to ask again."""
    loading: str | None = None
    failed: bool = False
    miss: MissReason | None = None

    @property
    def trusted(self) -> bool:
        """Whether the engine's blocks of this request hold what it has computed."""
        return self.loading is None and not self.failed
