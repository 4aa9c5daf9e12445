"""Random schedules in real vLLM: no wrong token, no hang, no leak."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("below", [False, True], ids=["slab", "folder"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_random_schedules_of_arrivals_aborts_preemptions_and_lost_bytes(drive, tmp_path, name, below):
    facts = drive("schedules", name, "100", *[str(tmp_path / "kv")] * below)
    assert (facts["written"] > 0) == below
    assert facts["bad"] == []
    assert (facts["runs"], facts["free"], facts["requests"], facts["threads"]) == (100, [facts["blocks"]], [0], [])
    assert min(facts["preemptions"], facts["hits"], facts["evictions"], facts["forgotten"]) > 0
