"""The table of a push."""

import pytest

from layercast.control.push_states import LIVE, TRANSITIONS, PushEvent, PushState, after
from layercast.errors import BadTransition


def test_a_push_that_has_ended_never_changes():
    for state in set(PushState) - set(LIVE):
        for event in PushEvent:
            assert after(state, event) is state


def test_every_live_push_can_be_aborted_lost_expired_or_found_corrupt():
    for state in LIVE:
        for event in (PushEvent.ABORT, PushEvent.LOSE, PushEvent.EXPIRE, PushEvent.DIFFER):
            assert after(state, event) not in LIVE


@pytest.mark.parametrize(
    ("state", "event"),
    [(s, e) for s in LIVE for e in PushEvent if (s, e) not in TRANSITIONS],
)
def test_what_cannot_happen_raises(state, event):
    with pytest.raises(BadTransition, match=event):
        after(state, event)


def test_the_way_from_offer_to_landing():
    state = PushState.OFFERED
    for event in (PushEvent.LAYER, PushEvent.LAYER, PushEvent.COMPLETE, PushEvent.CONFIRM):
        state = after(state, event)
    assert state is PushState.LANDED
