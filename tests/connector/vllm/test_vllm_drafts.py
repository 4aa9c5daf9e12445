"""Saves of vLLM's schedulers that verify drafts: right blocks alone, and all of them, however late their copies end."""

import pytest

SCHEDULES = 40


@pytest.fixture(scope="module", params=["calm", pytest.param("", marks=pytest.mark.slow)])
def facts(drive, request):
    return drive("drafts", str(SCHEDULES), *request.param.split())


def test_what_is_saved_is_what_its_tokens_make_and_an_answered_request_leaves_nothing_unsaved(facts):
    """Drafts that are rejected, prefixes in part held and in part loaded, aborts; few blocks wait for the answer."""
    assert facts["bad"] == []
    assert facts["runs"] == SCHEDULES


def test_the_schedules_did_meet_what_they_are_for(facts):
    assert facts["checked"] > 10 * SCHEDULES
    assert facts["loads"] > SCHEDULES
    assert facts["rejected"] > facts["accepted"] > 50 * SCHEDULES
