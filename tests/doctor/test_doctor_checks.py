import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.doctor.checks import RESTS_ON, Check, Level, after_refusals
from layercast.doctor.examine import examine

NAMES = sorted({*RESTS_ON, *(name for on in RESTS_ON.values() for name in on), "python", "torch"})
CHECKS = st.builds(Check, st.sampled_from(NAMES), st.sampled_from([Level.OK, Level.WARNING, Level.ERROR]), st.just("x"))


@given(st.lists(CHECKS, max_size=12))
def test_nothing_that_rests_on_a_refusal_is_said_to_be_well_and_all_else_stays(checks):
    found = list(after_refusals(checks))
    assert [check.name for check in found] == [check.name for check in checks]
    for index, (before, after) in enumerate(zip(checks, found, strict=True)):
        refused = {check.name for check in checks[:index] if check.level is Level.ERROR}
        rests = bool(refused & set(RESTS_ON.get(before.name, ())))
        assert after == before or rests
        assert (after.level is Level.UNCHECKED) == rests


CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 512}


@pytest.mark.parametrize("changes", [{"is_encoder_decoder": True}, {"model_type": "mamba", "mamba_dt_rank": 1}])
def test_of_a_model_that_is_refused_nothing_more_is_said_and_no_command_is_offered(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    report = examine(str(tmp_path), None, None, {"XDG_CACHE_HOME": str(tmp_path)}, ["host_bytes=1MiB"])
    levels = {check.name: check.level for check in report.checks}
    assert levels["model"] is Level.ERROR
    unchecked = {name for name, level in levels.items() if level is Level.UNCHECKED}
    assert {"groups", "bytes", "ranks", "memory"} <= unchecked
    assert report.command == ""


def test_settings_that_cant_be_read_leave_what_they_decide_unchecked(tmp_path):
    report = examine(None, None, None, {"XDG_CACHE_HOME": str(tmp_path)}, ["verfy=1"])
    levels = {check.name: check.level for check in report.checks}
    assert levels["settings"] is Level.ERROR
    assert levels["memory"] is levels["memlock"] is Level.UNCHECKED


def test_on_a_cpu_the_memory_of_a_model_has_its_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    report = examine(str(tmp_path), None, None, {"XDG_CACHE_HOME": str(tmp_path)}, ["host_bytes=1MiB"])
    assert "beside 3 MiB of weights" in next(check.found for check in report.checks if check.name == "memory")
