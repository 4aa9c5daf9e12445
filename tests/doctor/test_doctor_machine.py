import json

import msgspec
import pytest

from layercast import __version__
from layercast.config import GIB, KNOWN, Config, from_mapping
from layercast.doctor.checks import Check, Level
from layercast.doctor.gpu import Card, cards
from layercast.doctor.machine import Facts, gather, judge
from layercast.move.costs import CostFile, Costs

GOOD = Facts(
    python="3.11.7",
    torch="2.13.0+cpu",
    transformers="5.19.0",
    vllm="0.32.0",
    gpu=False,
    memory_free=20 * GIB,
    config=Config(host_bytes=3 * GIB),
    shm_free=10 * GIB,
    memlock=None,
    loopback_error="",
    cache="/c/layercast",
    cache_free=10 * GIB,
    weights=True,
    weights_converted=False,
    config_error="",
)
H200 = Card("NVIDIA H200", "32.0 GT/s PCIe x16")


def checks(**changes: object) -> tuple[Check, ...]:
    config = msgspec.structs.replace(GOOD.config, **{key: changes.pop(key) for key in KNOWN if key in changes})
    return judge(msgspec.structs.replace(GOOD, config=config, **changes))


def finding(name: str, **changes: object) -> Check:
    return {check.name: check for check in checks(**changes)}[name]


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
        ("memory", {"host_bytes": 8}, Level.WARNING, "takes 8 bytes (host_bytes), in which no block"),
        ("memory", {"memory_free": None}, Level.NOTE, "does not tell"),
        ("memory", {"weight_bytes": None}, Level.OK, "weights that are not here"),
        ("memory", {"weight_bytes": 2 * GIB}, Level.OK, "3.0 GiB (host_bytes) beside 2.0 GiB of weights"),
        ("memory", {"weight_bytes": 16 * GIB}, Level.WARNING, "16.0 GiB of weights"),
        ("memory", {"weight_bytes": 18 * GIB}, Level.ERROR, "18.0 GiB of weights"),
        ("memory", {"weight_bytes": 21 * GIB}, Level.ERROR, "21.0 GiB of weights"),
        ("gpu", {}, Level.OK, "on the CPU"),
        ("gpu", {"gpu": True}, Level.WARNING, "no card is given"),
        ("gpu", {"gpu": True, "cards": (H200, H200)}, Level.OK, "2 x NVIDIA H200 (32.0 GT/s PCIe x16; copies not"),
        ("gpu", {"gpu": True, "cards": (H200,), "visible": ""}, Level.WARNING, "hides them"),
        ("gpu", {"gpu": True, "cards": (H200,), "visible": "0"}, Level.OK, "1 x NVIDIA H200"),
        ("gpu", {"gpu": True, "cards": (H200,), "queues": "32"}, Level.NOTE, "CUDA_DEVICE_MAX_CONNECTIONS = '32'"),
        ("gpu", {"gpu": True, "cards": (H200,), "queues": "1"}, Level.NOTE, "1 or 2 copies hold up others"),
        ("gpu", {"gpu": True, "cards": (H200,), "queues": "8"}, Level.OK, "1 x NVIDIA H200"),
        ("gpu", {"gpu": True, "queues": "32"}, Level.WARNING, "no card is given"),
        ("gpu", {"gpu": True, "cards": (H200,), "numba": False}, Level.WARNING, "numba is missing"),
        ("folder", {"disk_path": "/kv", "folder_error": "/kv is no folder"}, Level.ERROR, "/kv is no folder"),
        ("folder", {"disk_path": "/kv", "folder_room": GIB, "disk_bytes": 2 * GIB}, Level.WARNING, "room for 1.0 GiB"),
        ("folder", {"disk_path": "/kv", "folder_room": 3 * GIB, "disk_bytes": 2 * GIB}, Level.OK, "/kv"),
        ("folder", {"disk_path": "/kv", "folder_room": 40 * GIB, "folder_new": True}, Level.NOTE, "would be made"),
        ("folder", {"disk_path": "/kv", "folder_room": GIB, "folder_new": True}, Level.WARNING, "would be made"),
        ("disk", {"cache_error": "/c is no folder"}, Level.WARNING, "no folder"),
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
        {"weight_bytes": 21 * GIB},
        {"host_bytes": 8},
        {"shm_free": 0},
        {"loopback_error": "x"},
        {"cache_free": 0},
        {"cache_error": "x"},
        {"gpu": True, "torch": "2.13.0"},
        {"disk_path": "/kv", "folder_error": "x"},
        {"disk_path": "/kv", "folder_room": 0, "disk_bytes": 1},
    ],
)
def test_whatever_is_a_warning_or_an_error_says_what_to_do(changes):
    bad = [c for c in checks(**changes) if c.level in (Level.WARNING, Level.ERROR)]
    assert bad
    assert all(check.advice for check in bad)


@pytest.mark.parametrize("weights", [0, 12 * GIB + 1, 20 * GIB - (3 << 20)])
def test_the_memory_that_is_advised_is_no_longer_a_trouble_and_little_more_would_be(weights):
    advised = finding("memory", host_bytes=21 * GIB, weight_bytes=weights).advice.split()[3]
    most = from_mapping({"host_bytes": advised}).host_bytes
    assert finding("memory", host_bytes=most, weight_bytes=weights).level is Level.OK
    assert finding("memory", host_bytes=most * 11 // 10, weight_bytes=weights).level is not Level.OK


def test_where_no_slab_would_have_room_none_is_advised():
    assert "host_bytes" not in finding("memory", weight_bytes=20 * GIB - 8).advice


@pytest.mark.parametrize("folder", ["/proc", "/proc/kv", "/sys/kv/deeper", "/dev/kv"])
def test_a_folder_where_the_kernel_keeps_no_files_is_refused_with_another_advised(folder):
    facts = gather(None, {}, [f"disk_path={folder}"])
    check = next(check for check in judge(facts) if check.name == "folder")
    assert (check.level, facts.folder_room) == (Level.ERROR, 0)
    assert "keeps no files" in check.found
    assert "on a disk" in check.advice
    assert gather(None, {}, ["disk_path=/dev/shm"]).folder_error == ""


def test_where_nothing_is_free_no_size_of_nothing_is_advised():
    assert "disk_bytes" not in finding("folder", disk_path="/kv", folder_room=0, disk_bytes=1).advice


def test_this_machine_can_be_looked_at_and_a_bad_setting_is_a_finding(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path), "LAYERCAST_HOST_BYTES": "1048576"}
    facts = gather(None, environ, ())
    assert facts.config.host_bytes == 1 << 20
    assert facts.cache == str(tmp_path / "layercast")
    assert facts.loopback_error == ""
    assert facts.config_error == ""
    assert "unknown setting nonsense" in gather(None, environ, ["nonsense=1"]).config_error
    assert list(tmp_path.iterdir()) == []


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_card_is_known_by_the_drivers_files_and_its_costs_by_its_own_number(tmp_path):
    told = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-0011-22\nBus Location: \t 0000:1B:00.0\nDevice Minor: \t 1\n"
    written(tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0/information", told)
    for name in ("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm"):
        written(tmp_path / name, "")
    written(tmp_path / "sys/bus/pci/devices/0000:1b:00.0/max_link_speed", "32.0 GT/s PCIe\n")
    written(tmp_path / "sys/bus/pci/devices/0000:1b:00.0/max_link_width", "16\n")
    links = {"up": Costs(53.6, 1.0, 0.2, 16.0), "peer 3": Costs(390.2, 1.0, 0.2, 300.0)}
    kept = msgspec.to_builtins(CostFile("001122", 13000, __version__, True, links))
    costs, bare = tmp_path / "cache" / "costs-001122.json", Card("an NVIDIA card")
    assert cards(tmp_path / "cache", tmp_path) == (bare, H200)
    written(costs, json.dumps(kept))
    assert cards(tmp_path / "cache", tmp_path) == (bare, Card(H200.name, H200.link, "up 54, peer 390"))
    for text in (
        "{",
        json.dumps(kept | {"layercast": "0"}),
        json.dumps(kept | {"links": {"up": {}}}),
        json.dumps(kept | {"speed": 1}),
    ):
        costs.write_text(text)
        assert cards(tmp_path / "cache", tmp_path) == (bare, H200)


def test_a_folder_is_looked_at_before_it_is_there_and_never_made(tmp_path, monkeypatch):
    monkeypatch.setattr("layercast.doctor.machine.free_bytes", lambda folder: 7)
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "block").write_bytes(bytes(1 << 20))
    facts = {name: gather(None, {}, [f"disk_path={tmp_path / name}"]) for name in ("kv", "new/deeper", "file/deeper")}
    assert facts["new/deeper"].folder_error == facts["kv"].folder_error == ""
    assert facts["file/deeper"].folder_error == f"{tmp_path / 'file'} is no folder"
    assert (facts["kv"].folder_room, facts["new/deeper"].folder_room) == (7 + (1 << 20), 7)
    assert (facts["kv"].folder_new, facts["new/deeper"].folder_new) == (False, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kv"]
