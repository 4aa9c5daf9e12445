"""Drives of real vLLM: each `drive_*.py` runs in a process of its own (vLLM keeps global state) and prints facts."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DRIVE_S = 400  # for a drive on a slow machine; the first one also waits for vLLM's imports


def pytest_collection_modifyitems(items):
    without = pytest.mark.skip(reason="vLLM is not installed here (make test installs a CPU build)")
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(DRIVE_S + 20))
            if find_spec("vllm") is None:
                item.add_marker(without)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Where the drives keep the weights of their tiny models."""
    return tmp_path_factory.mktemp("models")


class Forks:
    """A process that has vLLM imported and forks one for each drive; made when first asked."""

    def __init__(self, folder):
        self._folder, self._process = folder, None

    def run(self, command):
        """Run a drive to its end: its exit code, and what it printed there and as errors."""
        if self._process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
            environment = {**os.environ, "PYTHONHASHSEED": "random"}
            self._process = subprocess.Popen([sys.executable, str(HERE / "forks.py")], env=environment, **pipes)
        files = [self._folder / name for name in ("printed", "errors")]
        for file in files:
            file.write_text("")
        script, *arguments = command
        print(json.dumps([script, arguments, *map(str, files)]), file=self._process.stdin, flush=True)
        ended, _, _ = select.select([self._process.stdout], [], [], DRIVE_S)
        line = self._process.stdout.readline() if ended else ""
        if not line:
            self.close()
        return line.strip(), *(file.read_text() for file in files)

    def close(self):
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with self._process:
                self._process = None


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def drive(models, forks):
    """Run a script to its end; what it says. `drive("saves", "plain")` runs drive_saves.py on the models' folder.

    hash_seed: of a process that is started for this drive alone.
    """

    def run(script, *arguments, hash_seed=None):
        command = [str(HERE / f"drive_{script}.py"), str(models), *arguments]
        if hash_seed is None:
            code, printed, errors = forks.run(command)
        else:
            environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
            told = {"capture_output": True, "text": True, "timeout": DRIVE_S, "check": False, "env": environment}
            done = subprocess.run([sys.executable, *command], **told)
            code, printed, errors = str(done.returncode), done.stdout, done.stderr
        lines = [line for line in printed.splitlines() if line.startswith("FACTS ")]
        assert code == "0", (
            f"exit {code or 'unknown: past its time, or nobody forks any more'}\n" + printed[-2000:] + errors[-4000:]
        )
        assert len(lines) == 1
        return json.loads(lines[0].removeprefix("FACTS "))

    return run


def replies(run):
    """Tokens, and their log probabilities to three places, of every reply of a run."""
    return [(reply["tokens"], [round(value, 3) for value in reply["logprobs"]]) for reply in run["replies"]]
