"""A push on one side, what both ends do alike, and what they need of the engine. Does not know which end it is."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from layercast.config import Config
from layercast.control.push_states import LIVE, PushEvent, PushState, after
from layercast.errors import BadTransition, Missing
from layercast.move.base import Mover
from layercast.observe.timeline import OFF, Timeline
from layercast.spec.groups import Layout
from layercast.spec.keys import Identity
from layercast.transport.base import Peer, Transport


@dataclass(eq=False)
class Push:
    """One push on this side. `reason`: why it ended, unless it landed."""

    transfer: str
    epoch: int
    deadline: float
    state: PushState = PushState.OFFERED
    reason: str = ""
    peer: Peer | None = None
    over: threading.Event = field(default_factory=threading.Event)
    """Set when it is quiet."""

    @property
    def quiet(self) -> bool:
        """Whether the push no longer touches our blocks."""
        return self.over.is_set()

    def hush(self) -> None:
        """The push touches our blocks no more."""
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
    timeline: Timeline = OFF


Kind = TypeVar("Kind", bound=Push)


class Pushes(ABC, Generic[Kind]):
    """One end's pushes, by transfer. `lost` belongs to the transport's threads, the rest to the engine's."""

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self._engine = engine
        self._transport = transport
        self._lock = threading.RLock()
        self._pushes: dict[str, Kind] = {}

    @abstractmethod
    def cancel(self, transfer: str, reason: str) -> None:
        """Give a push up; the peer is told. Raises Missing."""

    @abstractmethod
    def _end(self, push: Kind, event: PushEvent, reason: str) -> None:
        """Take in an event that ends a live push. Lock held."""

    def push(self, transfer: str) -> Kind:
        """A push as it stands. Raises Missing."""
        push = self._pushes.get(transfer)
        if push is None:
            raise Missing(f"{transfer}: no such push here; it has ended and was forgotten")
        return push

    def forget(self, transfer: str) -> None:
        """Drop an ended, quiet push. Raises Missing, BadTransition."""
        with self._lock:
            push = self.push(transfer)
            if push.state in LIVE or not push.quiet:
                raise BadTransition(f"{transfer} is {push.state} and its blocks are still in use; cancel it first")
            del self._pushes[transfer]

    def expire(self, now: float) -> None:
        """End the pushes whose deadline has come, and drop whoever may still write them, or never take them."""
        with self._lock:
            late = [push for push in self._pushes.values() if push.deadline <= now and not push.quiet]
            for push in late:
                self._end(push, PushEvent.EXPIRE, "push_timeout_s is over")
        for push in late:
            if push.peer is not None:
                self._transport.disconnect(push.peer)  # `lost` follows once nothing of it can land any more

    def lost(self, peer: Peer) -> None:
        """A peer is gone: nothing of it lands here any more, and nothing more goes there."""
        with self._lock:
            for push in [push for push in self._pushes.values() if push.peer == peer]:
                self._end(push, PushEvent.LOSE, "the other instance is gone")

    def close(self) -> None:
        """Give everything up."""
        for transfer in list(self._pushes):
            self.cancel(transfer, "this instance is closing")
