import msgspec
import pytest

from layercast.doctor.checks import GIB, Check, Level
from layercast.doctor.machine import Facts, gather, judge

GOOD = Facts(
    python="3.11.7",
    torch="2.13.0+cpu",
    transformers="5.19.0",
    vllm="0.32.0",
    gpu=False,
    memory_free=20 * GIB,
    host_bytes=3 * GIB,
    shm_free=10 * GIB,
    memlock=None,
    loopback_error="",
    cache="/c/layercast",
    cache_free=10 * GIB,
    weights=True,
    weights_converted=False,
    config_error="",
)


def finding(name: str, **changes: object) -> Check:
    checks = {check.name: check for check in judge(msgspec.structs.replace(GOOD, **changes))}
    return checks[name]


def test_a_good_machine_has_nothing_but_ok():
    assert {check.level for check in judge(GOOD)} == {Level.OK}


@pytest.mark.parametrize(
    ("name", "changes", "level", "says"),
    [
        ("settings", {"config_error": "environment: unknown setting x"}, Level.ERROR, "unknown setting x"),
        ("torch", {"torch": None}, Level.WARNING, "not installed"),
        ("torch", {"torch": "2.9.1"}, Level.ERROR, "older than 2.11"),
        ("torch", {"gpu": True}, Level.WARNING, "CPU build"),
        ("torch", {"gpu": True, "torch": "2.13.0+cu130"}, Level.OK, "2.13.0+cu130"),
        ("transformers", {"transformers": None}, Level.WARNING, "not installed"),
        ("transformers", {"transformers": "5.9.0"}, Level.ERROR, "older than 5.17"),
        ("transformers", {"transformers": "5.25.0.dev0"}, Level.NOTE, "newer than 5.24"),
        ("vllm", {"vllm": None}, Level.NOTE, "not installed"),
        ("vllm", {"vllm": "0.33.0"}, Level.OK, "0.33.0"),
        ("vllm", {"vllm": "0.34.0"}, Level.WARNING, "0.26 to 0.33"),
        ("vllm", {"vllm": "0.25.1"}, Level.WARNING, "0.26 to 0.33"),
        ("memory", {"host_bytes": 21 * GIB}, Level.ERROR, "21.0 GiB"),
        ("memory", {"host_bytes": 15 * GIB}, Level.WARNING, "20.0 GiB of memory are free"),
        ("memory", {"memory_free": None}, Level.NOTE, "does not tell"),
        ("memlock", {"memlock": 8 << 20}, Level.NOTE, "8 MiB"),
        ("memlock", {"memlock": 4 * GIB}, Level.OK, "4.0 GiB"),
        ("shm", {"shm_free": 64 << 20}, Level.WARNING, "64 MiB"),
        ("shm", {"shm_free": None}, Level.NOTE, "no /dev/shm"),
        ("loopback", {"loopback_error": "Operation not permitted"}, Level.ERROR, "Operation not permitted"),
        ("disk", {"cache_free": 100 << 20}, Level.ERROR, "/c/layercast has 100 MiB free"),
        ("disk", {"cache_free": 100 << 20, "weights_converted": True}, Level.OK, "100 MiB"),
        ("disk", {"cache_free": 100 << 20, "weights": False}, Level.OK, "100 MiB"),
        ("weights", {"weights": False}, Level.NOTE, "not installed"),
        ("weights", {"weights_converted": True, "weights": False}, Level.OK, "ready"),
    ],
)
def test_each_trouble_has_its_level_and_says_what_was_found(name, changes, level, says):
    check = finding(name, **changes)
    assert check.level is level
    assert says in check.found


@pytest.mark.parametrize(
    "changes",
    [
        {"config_error": "x"},
        {"torch": None},
        {"torch": "2.9.1"},
        {"transformers": "5.9.0"},
        {"vllm": "0.34.0"},
        {"memory_free": GIB},
        {"shm_free": 0},
        {"loopback_error": "x"},
        {"cache_free": 0},
    ],
)
def test_whatever_is_a_warning_or_an_error_says_what_to_do(changes):
    bad = [c for c in judge(msgspec.structs.replace(GOOD, **changes)) if c.level in (Level.WARNING, Level.ERROR)]
    assert bad
    assert all(check.advice for check in bad)


def test_the_memory_that_is_advised_is_no_longer_a_trouble():
    advised = int(finding("memory", host_bytes=21 * GIB).advice.split()[3])
    assert finding("memory", host_bytes=advised).level is Level.OK


def test_this_machine_can_be_looked_at_and_a_bad_setting_is_a_finding(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path), "LAYERCAST_HOST_BYTES": "1048576"}
    facts = gather(None, environ, ())
    assert facts.host_bytes == 1 << 20
    assert facts.cache == str(tmp_path / "layercast")
    assert facts.loopback_error == ""
    assert facts.config_error == ""
    assert "unknown setting nonsense" in gather(None, environ, ["nonsense=1"]).config_error
    assert list(tmp_path.iterdir()) == []
