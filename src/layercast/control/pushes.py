"""A push on one side, and what both ends need of the engine they serve. Does not know which end it is."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from layercast.config import Config
from layercast.control.push_states import LIVE, PushEvent, PushState, after
from layercast.move.base import Mover
from layercast.observe.timeline import OFF, Timeline
from layercast.spec.groups import Layout
from layercast.spec.keys import Identity
from layercast.transport.base import Peer


@dataclass(eq=False)
class Push:
    """One push on this side. `reason`: why it ended, unless it landed."""

    transfer: str
    epoch: int
    deadline: float
    state: PushState = PushState.OFFERED
    reason: str = ""
    peer: Peer | None = None
    quiet: bool = False
    """Whether the push no longer touches our blocks."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when it is quiet, for whoever waits."""

    def hush(self) -> None:
        """The push touches our blocks no more."""
        self.quiet = True
        self.over.set()

    def see(self, event: PushEvent, reason: str = "") -> bool:
        """Take in an event; whether it ended the push. Raises BadTransition."""
        was = self.state
        self.state = after(was, event)
        if was in LIVE and self.state not in LIVE:
            self.reason = reason
            return True
        return False


@dataclass(frozen=True, slots=True)
class Engine:
    """What a push needs of the engine it serves."""

    layout: Layout
    identities: tuple[Identity, ...]
    mover: Mover
    config: Config
    clock: Callable[[], float]
    keep: tuple[object, ...] = ()
    timeline: Timeline = OFF
