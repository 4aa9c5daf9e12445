"""The life of a push, on either side, as a table: (state, event) to the next state.

A push ends once. Whatever comes for one that has ended is late and changes nothing; an event that a live push can't see
in its state is an error of whoever sent it. Does not know sockets, blocks or clocks.
"""

from enum import StrEnum

from layercast.errors import BadTransition


class PushState(StrEnum):
    """Where a push is."""

    OFFERED = "offered"
    MOVING = "moving"
    DELIVERED = "delivered"
    LANDED = "landed"
    ABORTED = "aborted"
    LOST = "lost"
    EXPIRED = "expired"
    CORRUPT = "corrupt"


class PushEvent(StrEnum):
    """What happens to it."""

    LAYER = "layer"
    """A layer of a part has gone out, or has arrived."""
    COMPLETE = "complete"
    """Every layer of the last part has gone out, or has arrived."""
    CONFIRM = "confirm"
    """The receiver has checked everything."""
    ABORT = "abort"
    """Either side gave the request up."""
    LOSE = "lose"
    """The peer is gone."""
    EXPIRE = "expire"
    """`push_timeout_s` is over."""
    DIFFER = "differ"
    """A digest after landing is not the one before sending."""


LIVE = (PushState.OFFERED, PushState.MOVING, PushState.DELIVERED)

TRANSITIONS: dict[tuple[PushState, PushEvent], PushState] = {
    (PushState.OFFERED, PushEvent.LAYER): PushState.MOVING,
    (PushState.MOVING, PushEvent.LAYER): PushState.MOVING,
    (PushState.MOVING, PushEvent.COMPLETE): PushState.DELIVERED,
    (PushState.DELIVERED, PushEvent.CONFIRM): PushState.LANDED,
    **{
        (state, event): end
        for state in LIVE
        for event, end in (
            (PushEvent.ABORT, PushState.ABORTED),
            (PushEvent.LOSE, PushState.LOST),
            (PushEvent.EXPIRE, PushState.EXPIRED),
            (PushEvent.DIFFER, PushState.CORRUPT),
        )
    },
}


def after(state: PushState, event: PushEvent) -> PushState:
    """The state after an event. One that has ended stays as it is; raises BadTransition for what can't happen."""
    if state not in LIVE:
        return state
    target = TRANSITIONS.get((state, event))
    if target is None:
        raise BadTransition(f"a push that is {state} can't see {event!r}; the peer broke the protocol, drop it")
    return target
