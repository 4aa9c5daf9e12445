"""Beside another connector, under vLLM's MultiConnector."""

import pytest


@pytest.mark.parametrize("handshake", ["made", pytest.param("lost", marks=pytest.mark.slow)])
def test_a_prompt_is_loaded_beside_another_connector_whether_or_not_hands_were_shaken(drive, handshake):
    facts = drive("multi", handshake)
    cold, warm = facts["runs"]
    assert warm["tokens"] == cold["tokens"]
    assert warm["cached"] == 6 * facts["block"]
    assert warm["ends"] == ["landed"]
    assert facts["tracked"] == 0
