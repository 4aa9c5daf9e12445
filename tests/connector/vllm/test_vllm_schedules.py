"""Random schedules in real vLLM: no wrong token, no hang, no leak."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_random_schedules_of_arrivals_aborts_preemptions_and_lost_bytes(drive, name):
    facts = drive("schedules", name, "100")
    assert facts["bad"] == []
    assert (facts["runs"], facts["free"], facts["requests"], facts["threads"]) == (100, [facts["blocks"]], [0], [])
    assert min(facts["preemptions"], facts["hits"], facts["evictions"], facts["forgotten"]) > 0
