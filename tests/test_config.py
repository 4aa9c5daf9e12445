import copy
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast import config
from layercast.config import Config, cache_folder, existing, from_mapping, from_sources
from layercast.errors import BadSetting, UnknownSetting


def test_nothing_set_is_a_good_setting():
    assert from_mapping({}) == Config()
    assert 0 < Config().host_bytes <= config.MAX_DEFAULT_HOST_BYTES


def test_an_unknown_setting_is_named_with_its_source_and_all_known_ones():
    with pytest.raises(UnknownSetting) as caught:
        from_mapping({"use_layerwize": True}, "extra config")
    text = str(caught.value)
    assert text.startswith("extra config: unknown setting use_layerwize (did you mean use_layerwise?); known: ")
    assert all(name in text for name in config.KNOWN)


@given(st.sampled_from(config.KNOWN), st.data())
def test_a_name_that_lacks_one_letter_or_is_in_capitals_is_told_with_the_one_that_was_meant(name, data):
    lost = data.draw(st.integers(0, len(name) - 1))
    for written in (name[:lost] + name[lost + 1 :], name.upper()):
        with pytest.raises(UnknownSetting) as caught:
            from_mapping({written: 1}, "here")
        assert f" {written} (did you mean {name}?); known: " in str(caught.value)


def test_of_several_unknown_names_each_has_a_suggestion_where_one_is_near():
    with pytest.raises(UnknownSetting, match=r"hostbytes \(did you mean host_bytes\?\), moon; known: "):
        from_sources(None, {}, ["moon=1", "hostbytes=8GiB"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layerwise_window", 0),
        ("layerwise_prefetch_layers", 0),
        ("layerwise_max_transfer_blocks", -1),
        ("host_bytes", 0),
        ("host_bytes", "lots"),
        ("host_bytes", "8G"),
        ("host_bytes", "9" * 400 + "TiB"),
        ("disk_bytes", "-1GiB"),
        ("disk_bytes", "0.1B"),
        ("lease_s", "1GiB"),
        ("layer_wait_ms", 0),
        ("push_timeout_s", 0.0),
        ("lease_s", -1.0),
        ("use_layerwise", "perhaps"),
        ("lease_s", "nan"),
        ("lease_s", float("inf")),
        ("push_timeout_s", "inf"),
        ("backend", "moon"),
        ("discard_partial_chunks", False),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_the_setting(name, value):
    with pytest.raises(BadSetting, match=name):
        from_mapping({name: value})
    with pytest.raises(BadSetting, match=name):
        Config(**{name: value})


def test_an_unknown_setting_is_refused_as_well_where_it_is_written_in_python():
    with pytest.raises(
        UnknownSetting, match=r"Config: unknown setting host_byte \(did you mean host_bytes\?\); known: backend, "
    ):
        Config(host_byte=1)


def test_a_value_below_the_least_is_told_with_the_source_it_is_in():
    with pytest.raises(BadSetting, match="environment: host_bytes = '0': the least value is 1"):
        from_sources(None, {"LAYERCAST_HOST_BYTES": "0"})


def test_settings_can_be_copied_and_pickled():
    chosen = Config(host_bytes="1GiB", verify=False)
    assert pickle.loads(pickle.dumps(chosen)) == copy.deepcopy(chosen) == chosen


def test_settings_are_frozen_and_at_most_thirty():
    with pytest.raises(AttributeError):
        Config().verify = False
    assert len(config.KNOWN) <= 30


def test_text_values_are_read_as_the_type_they_stand_for():
    read = from_mapping({"host_bytes": "1048576", "use_layerwise": "false", "lease_s": "2.5"})
    assert (read.host_bytes, read.use_layerwise, read.lease_s) == (1 << 20, False, 2.5)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 << 30),
        ("500 MB", 500_000_000),
        ("1.5gib", 3 << 29),
        ("2.3GB", 2_300_000_000),
        ("64KiB", 64 << 10),
        ("7B", 7),
    ],
)
def test_a_size_may_be_written_with_its_unit_wherever_settings_come_from(tmp_path, text, count):
    path = tmp_path / "layercast.toml"
    path.write_text(f'disk_bytes = "{text}"\n')
    assert from_sources(path, {}).disk_bytes == count
    assert from_sources(None, {"LAYERCAST_DISK_BYTES": text}).disk_bytes == count
    assert from_sources(None, {}, [f"disk_bytes={text}"]).disk_bytes == count
    assert from_mapping({"layerwise_max_transfer_bytes": text}).layerwise_max_transfer_bytes == count
    assert Config(disk_bytes=text).disk_bytes == count


def test_a_size_that_is_none_says_what_to_write():
    with pytest.raises(BadSetting, match=r"command line: host_bytes = '8G': write bytes, or .* such as 8GiB"):
        from_sources(None, {}, ["host_bytes=8G"])


def test_the_environment_is_read_by_prefix_and_unknown_names_are_refused():
    assert from_sources(None, {"LAYERCAST_VERIFY": "false", "HOME": "/"}).verify is False
    with pytest.raises(UnknownSetting, match="environment: unknown setting verfy"):
        from_sources(None, {"LAYERCAST_VERFY": "false"})


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("verify = ")
    for path in (broken, tmp_path / "absent.toml"):
        with pytest.raises(BadSetting, match=path.name):
            from_sources(path, {})


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadSetting, match=r"binary\.toml"):
        from_sources(path, {})


def test_the_later_source_wins(tmp_path):
    path = tmp_path / "layercast.toml"
    path.write_text("layer_wait_ms = 1\nlease_s = 1.0\nverify = false\n")
    read = from_sources(path, {"LAYERCAST_LEASE_S": "2", "LAYERCAST_LAYER_WAIT_MS": "2"}, ["layer_wait_ms=3"])
    assert (read.layer_wait_ms, read.lease_s, read.verify) == (3, 2.0, False)


def test_a_mistake_is_told_with_the_source_it_is_in(tmp_path):
    path = tmp_path / "layercast.toml"
    path.write_text("lease = 1")
    with pytest.raises(UnknownSetting, match=r"layercast\.toml: unknown setting lease"):
        from_sources(path, {}, [])
    with pytest.raises(BadSetting, match=r"command line: .*verify"):
        from_sources(None, {}, ["verify=perhaps"])
    with pytest.raises(BadSetting, match="write it as key=value"):
        from_sources(None, {}, ["verify"])


def test_settings_survive_json():
    assert msgspec.json.decode(msgspec.json.encode(Config()), type=Config) == Config()


def test_the_cache_lies_where_the_desktop_says():
    assert str(cache_folder({"XDG_CACHE_HOME": "/c"})) == "/c/layercast"
    assert cache_folder({}).parts[-2:] == (".cache", "layercast")


def test_of_a_folder_that_is_not_there_or_cannot_be_looked_at_the_nearest_above_is_taken(tmp_path):
    assert existing(tmp_path / "new" / "deeper") == tmp_path
    assert existing(tmp_path / ("n" * 300)) == tmp_path  # a name that no system looks up
    assert existing(tmp_path) == tmp_path


def test_a_value_of_another_type_is_named_with_its_key_and_the_type_it_should_have():
    with pytest.raises(BadSetting, match=r"here: lease_s = 'soon': expected `float`, got `str`"):
        from_mapping({"lease_s": "soon"}, "here")


UNITS = (1 << 30, 10**9, 1 << 20, 10**6)


@given(st.integers(0, 1 << 50))
def test_a_size_that_is_rounded_down_is_read_as_no_more_and_nearly_as_much(count):
    read = from_mapping({"host_bytes": config.rounded_down(count)}).host_bytes if count else 0
    assert count * 0.9 < read + 1
    assert read <= count


@given(st.integers(1, 1 << 60) | st.builds(lambda n, unit: n * unit, st.integers(1, 4096), st.sampled_from(UNITS)))
def test_a_size_that_is_written_for_a_user_is_read_as_the_same(count):
    assert from_mapping({"host_bytes": config.as_setting(count)}).host_bytes == count


@pytest.mark.parametrize(
    ("count", "text"),
    [(20 << 30, "20GiB"), (3 << 29, "1.5GiB"), (10**10, "10GB"), (300 << 20, "300MiB"), (500_000_000, "500MB"), (7, 7)],
)
def test_a_size_is_written_for_a_user_in_the_largest_unit_that_says_it_exactly(count, text):
    assert config.as_written({"host_bytes": count, "layerwise_window": 7}) == {
        "host_bytes": text,
        "layerwise_window": 7,
    }
