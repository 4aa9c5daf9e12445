import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.config import KNOWN, Config, from_mapping
from layercast.doctor.checks import Level
from layercast.doctor.translate import CONNECTORS, Becomes, read, translate
from layercast.errors import BadSetting

ASCEND = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "backend": "memcache",
        "use_layerwise": True,
        "mooncake_rpc_port": "0",
        "layerwise_prefetch_layers": 3,
        "layerwise_max_transfer_bytes": 1 << 20,
        "h2d_stagger_us": 20,
        "save_decode_cache": False,
    },
}
LMCACHE = """# a file of LMCache's
chunk_size: 256
max_local_cpu_size: 5.0   # GB
local_disk: "file:///data/kv"
max_local_disk_size: 20
remote_url: null
use_layerwise: true
extra_config:
  first: 1
"""


def levels(found):
    return {check.name: check.level for check in found.checks}


def test_every_counterpart_is_a_setting_of_ours():
    keys = {rule.key for table in CONNECTORS.values() for rule in table.values() if isinstance(rule, Becomes)}
    assert keys <= set(KNOWN)
    assert len(keys) > 8


def test_ascend_store_keeps_the_names_that_mean_the_same_and_says_what_is_left_out():
    found = translate(ASCEND)
    ours = from_mapping(found.settings)
    assert (ours.layerwise_prefetch_layers, ours.layerwise_max_transfer_bytes, ours.h2d_stagger_us) == (3, 1 << 20, 20)
    assert not ours.save_decode_cache
    assert "backend" not in found.settings
    left_out = {name for name, level in levels(found).items() if level is Level.NOTE}
    assert left_out == {"backend", "mooncake_rpc_port"}


def test_lmcaches_file_gives_sizes_in_bytes_and_a_folder(tmp_path):
    path = tmp_path / "lmcache.yaml"
    path.write_text(LMCACHE)
    found = translate(read(path))
    assert from_mapping(found.settings) == Config(host_bytes=5 << 30, disk_path="/data/kv", disk_bytes=20 << 30)
    said = {check.name: check.found for check in found.checks}
    assert said["max_local_cpu_size"] == '5.0 -> host_bytes = "5GiB"'
    assert levels(found)["chunk_size"] is Level.NOTE
    assert levels(found)["extra_config"] is Level.WARNING


def test_lmcaches_settings_may_stand_in_the_extra_part_under_its_name():
    theirs = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {"lmcache.max_local_cpu_size": 2}}
    found = translate(theirs)
    assert found.settings == {"host_bytes": 2 << 30}
    assert levels(found)["kv_load_failure_policy"] is Level.NOTE


def test_nixls_roles_stay_and_need_a_folder():
    extra = {"kv_lease_duration": 45, "backends": ["UCX"], "kv_recompute_threshold": 128}
    theirs = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": extra}
    found = translate(theirs)
    assert (found.role, found.settings) == ("kv_consumer", {"kv_recompute_threshold": 128})
    assert levels(found)["backends"] is levels(found)["kv_lease_duration"] is Level.NOTE
    assert levels(found)["kv_role"] is levels(found)["kv_connector"] is Level.ERROR
    told = translate(theirs, {"disk_path": "/kv"})
    assert told.settings == {"kv_recompute_threshold": 128, "disk_path": "/kv"}
    assert "kv_role" not in levels(told)
    assert levels(told)["kv_connector"] is Level.WARNING


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize("name", ["NixlConnector", "NixlPushConnector"])
def test_what_nixl_does_and_we_do_not_is_said_with_how_to_start_the_two_sides(name, role):
    found = translate({"kv_connector": name, "kv_role": role, "kv_load_failure_policy": "recompute"})
    check = found.checks[0]
    assert (check.name, check.level) == ("kv_connector", Level.ERROR)
    assert all(word in check.found for word in (name, "GPU of one instance", "none is named"))
    words = ("disk_path", "kv_producer", "kv_consumer", "proxy", "remote_block_ids", "computed anew", "VLLM_NIXL_")
    assert all(word in check.advice for word in words)


OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def test_vllms_own_offloading_gives_a_size_of_each_rank_and_says_that_its_own_is_of_all():
    extra = {"cpu_bytes_to_use": 8 << 30, "block_size": 256, "offload_prompt_only": True, "eviction_policy": "arc"}
    found = translate(OFFLOADING | {"kv_connector_extra_config": extra})
    assert from_mapping(found.settings) == Config(host_bytes=8 << 30, save_decode_cache=False)
    said = {check.name: (check.level, check.found) for check in found.checks}
    assert said["cpu_bytes_to_use"][0] is Level.NOTE
    assert "all ranks together" in said["cpu_bytes_to_use"][1]
    assert "--block-size" in said["block_size"][1]
    assert said["eviction_policy"][0] is Level.NOTE
    simple = {"cpu_bytes_to_use_per_rank": 1 << 30, "disk_path": "/d", "disk_capacity_bytes": 2 << 30}
    found = translate({"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": simple})
    assert found.settings == {"host_bytes": 1 << 30, "disk_path": "/d", "disk_bytes": 2 << 30}


SERVE = """model: some/model
tensor-parallel-size: 2
kv-transfer-config:
  kv_connector: OffloadingConnector
  kv_role: kv_both
  kv_load_failure_policy: recompute
  kv_connector_extra_config:
    cpu_bytes_to_use: 1073741824
"""
INSIDE = OFFLOADING | {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(INSIDE),
        json.dumps({"kv_transfer_config": INSIDE}),
        json.dumps({"model": "m", "kv-transfer-config": json.dumps(INSIDE)}),
        SERVE,
        f"kv_transfer_config: '{json.dumps(INSIDE)}'",
    ],
)
def test_a_transfer_config_is_found_inside_a_file_of_vllms_settings(tmp_path, text):
    path = tmp_path / "serve"
    path.write_text(text)
    assert read(path) == INSIDE


@pytest.mark.parametrize(
    ("text", "connector", "settings"),
    [
        ("model: m\nkv-offloading-size: 16", "OffloadingConnector", {"host_bytes": 16 << 30}),
        ("kv_offloading_size: 2\nkv_offloading_backend: lmcache", "LMCacheMPConnector", {}),
        (
            json.dumps({"kv_transfer_config": {"kv_connector": "NixlConnector"}, "kv_offloading_size": 0.5}),
            "OffloadingConnector",
            {"host_bytes": 1 << 29},
        ),
    ],
)
def test_a_size_to_offload_names_the_connector_as_it_does_in_vllm(tmp_path, text, connector, settings):
    path = tmp_path / "serve"
    path.write_text(text)
    theirs = read(path)
    assert theirs["kv_connector"] == connector
    found = translate(theirs)
    assert found.settings == settings
    assert "kv_offloading_size" in levels(found)


def test_a_setting_given_beside_theirs_wins_and_is_told():
    found = translate(INSIDE, {"host_bytes": 5, "lease_s": 9.0})
    assert found.settings == {"host_bytes": 5, "lease_s": 9.0}
    assert ("host_bytes", Level.NOTE) in [(check.name, check.level) for check in found.checks]


def test_several_connectors_become_one_and_a_producer_with_a_folder_needs_no_word():
    disk = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {"local_disk": "/data"}}
    whole = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_port": "20001"}
    children = [ASCEND | {"kv_role": "kv_producer", "kv_load_failure_policy": None}, disk]
    found = translate(whole | {"kv_connector_extra_config": {"connectors": children}})
    assert found.settings["disk_path"] == "/data"
    assert found.settings["layerwise_prefetch_layers"] == 3
    assert "kv_role" not in levels(found)
    assert levels(found)["kv_port"] is Level.NOTE


@pytest.mark.parametrize(
    ("bare", "settings"),
    [
        ({"use_layerwise": True, "mooncake_rpc_port": "0"}, {"use_layerwise": True}),
        ({"chunk_size": 256, "max_local_cpu_size": 1}, {"host_bytes": 1 << 30}),
        ({"kv_recompute_threshold": 5, "engine_ttl": 9}, {"kv_recompute_threshold": 5}),
        ({"kv_connector_extra_config": {"kv_recompute_threshold": 5}}, {"kv_recompute_threshold": 5}),
        ({"cpu_bytes_to_use": 5, "block_size": 64}, {"host_bytes": 5}),
    ],
)
def test_without_a_name_the_keys_tell_whose_settings_they_are(bare, settings):
    assert translate(bare).settings == settings


def test_a_key_that_nobody_knows_is_a_warning_that_names_the_connector():
    found = translate({**ASCEND, "kv_connector_extra_config": {"speed": 9}})
    (check,) = found.checks
    assert (check.name, check.level) == ("speed", Level.WARNING)
    assert "AscendStoreConnector" in check.found
    assert check.advice


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"kv_connector": "P2pNcclConnector"}, "known: AscendStoreConnector"),
        ({**ASCEND, "kv_connector_extra_config": {"layerwise_prefetch_layers": 0}}, "least value is 1"),
        ({**ASCEND, "kv_connector_extra_config": {"use_layerwise": "perhaps"}}, "use_layerwise"),
        ({"max_local_cpu_size": "much", "chunk_size": 1}, "max_local_cpu_size.*a number of GiB"),
        ({"max_local_cpu_size": float("inf")}, "a number of GiB"),
        ({"kv_connector": "LayercastConnector"}, "layercast's own already"),
        ({**ASCEND, "kv_role": "both"}, "known roles: kv_both"),
        ({"model": "m", "port": 8000}, "model, port: no setting of"),
    ],
)
def test_what_cant_be_translated_is_refused_with_its_name(theirs, says):
    with pytest.raises(BadSetting, match=says):
        translate(theirs)


@pytest.mark.parametrize("text", ["", "{", "just words", "- a", "key: 1\nno key here", "kv_transfer_config: 1"])
def test_a_file_in_neither_form_is_refused(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(BadSetting):
        read(path)
    with pytest.raises(BadSetting, match="nothing"):
        read(tmp_path / "nothing")


VALUES = st.one_of(st.none(), st.booleans(), st.integers(1, 1 << 20), st.floats(1, 100), st.text("ab:#/ '", max_size=8))


@given(st.dictionaries(st.text("abc_", min_size=1), VALUES, min_size=1, max_size=6))
def test_yaml_and_json_of_the_same_settings_are_read_alike(settings):
    with tempfile.TemporaryDirectory() as folder:
        as_json, as_yaml = Path(folder) / "a", Path(folder) / "b"
        as_json.write_text(json.dumps(settings))
        as_yaml.write_text("\n".join(f"{key}: {json.dumps(value)}  # so" for key, value in settings.items()))
        assert read(as_yaml) == read(as_json)


@given(st.sampled_from(sorted(CONNECTORS)), st.dictionaries(st.text(min_size=1, max_size=30), VALUES, max_size=4))
def test_every_key_is_spoken_of_once(name, extra):
    table = CONNECTORS[name]
    known = dict.fromkeys(table)
    found = translate(
        {"kv_connector": name, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra | known}
    )
    pushes = ["kv_connector"] if name.startswith("Nixl") else []
    assert sorted(check.name for check in found.checks) == sorted([*(extra | known), *pushes])


def multi(*children, **more):
    whole = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return whole | {"kv_connector_extra_config": {"connectors": list(children), **more}}


def test_whatever_stands_beside_the_settings_of_several_connectors_is_spoken_of():
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cuda", "engine_id": "e"}
    found = translate(multi(nixl, {"kv_connector": "MultiConnector", "deep": 1} | multi(ASCEND), priority=2))
    assert {"kv_role", "kv_buffer_device", "engine_id", "priority", "deep", "backend"} <= set(levels(found))
    said = {check.name: check.found for check in found.checks}
    assert said["kv_buffer_device"] == 'NixlConnector: "cuda": left out; nothing here reads it.'
    assert said["kv_role"] == 'NixlConnector: "kv_consumer": that of MultiConnector counts.'


def test_a_connector_among_several_that_is_not_known_is_left_out_with_a_word():
    found = translate(multi(ASCEND, {"kv_connector": "P2pNcclConnector", "kv_port": 1}))
    assert found.settings["layerwise_prefetch_layers"] == 3
    assert levels(found)["kv_connector"] is Level.WARNING
    assert any("P2pNcclConnector" in check.found for check in found.checks)


def test_of_two_connectors_that_set_the_same_the_one_that_lost_is_named():
    first, second = (
        {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {"max_local_cpu_size": size}}
        for size in (1, 2)
    )
    found = translate(multi(first, second))
    assert found.settings == {"host_bytes": 2 << 30}
    assert [check.level for check in found.checks] == [Level.OK, Level.NOTE]
    assert 'in place of "1GiB"' in found.checks[1].found


@pytest.mark.parametrize("children", [None, {}, ["LMCacheConnectorV1"]])
def test_several_connectors_that_are_no_list_of_tables_are_refused(children):
    with pytest.raises(BadSetting, match="connectors"):
        translate({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}})


@pytest.mark.parametrize("theirs", [{}, {"kv_connector": "NixlConnector", "kv_connector_extra_config": [1]}])
def test_what_holds_no_settings_is_told_as_such(theirs):
    with pytest.raises(BadSetting, match="settings"):
        translate(theirs)


def test_a_file_that_is_not_there_is_told_as_such_and_a_folder_by_the_systems_reason_each_named_once(tmp_path):
    for path, reason in ((tmp_path / "absent.yaml", "there is no such file"), (tmp_path, "can't be read: Is a dir")):
        with pytest.raises(BadSetting) as caught:
            read(path)
        text = str(caught.value)
        assert text.startswith(f"{path}: {reason}")
        assert (text.count(str(path)), "Errno" in text) == (1, False)


def test_a_file_that_is_no_text_is_told_as_such(tmp_path):
    (tmp_path / "lmcache.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BadSetting, match="can't be read as text"):
        read(tmp_path / "lmcache.yaml")
