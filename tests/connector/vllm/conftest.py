"""Drives of real vLLM: each `drive_*.py` runs in a process of its own (vLLM keeps global state) and prints facts."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FIRST_USE_S = 400  # vLLM inspects an architecture once, in a process of its own, and keeps the result


def pytest_collection_modifyitems(items):
    without = pytest.mark.skip(reason="vLLM is not installed here (make test installs a CPU build)")
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(FIRST_USE_S + 20))
            if find_spec("vllm") is None:
                item.add_marker(without)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Where the drives keep the weights of their tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def drive(models):
    """Run a script to its end; what it says. `drive("saves", "plain")` runs drive_saves.py on the models' folder."""

    def run(script, *arguments, hash_seed="random"):
        command = [sys.executable, str(HERE / f"drive_{script}.py"), str(models), *arguments]
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FIRST_USE_S, check=False, env=environment
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert len(lines) == 1
        return json.loads(lines[0].removeprefix("FACTS "))

    return run


def replies(run):
    """Tokens, and their log probabilities to three places, of every reply of a run."""
    return [(reply["tokens"], [round(value, 3) for value in reply["logprobs"]]) for reply in run["replies"]]
