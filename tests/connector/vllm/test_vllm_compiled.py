"""A model that vLLM compiles."""

import pytest

pytestmark = pytest.mark.slow


def test_a_compiled_model_loads_and_saves_layer_by_layer(drive):
    facts = drive("compiled")
    assert facts["warm"]["loads"] == [["landed", True, facts["bytes"], 4, 0]]
    assert facts["cold"]["saves"] == [[True, facts["bytes"], 4, 0]]
    assert facts["warm"]["replies"][0]["tokens"] == facts["cold"]["replies"][0]["tokens"]
    assert facts["warm"]["waited"] == 4 * facts["warm"]["moving"] > 0
    assert facts["drained"]["idle"]
