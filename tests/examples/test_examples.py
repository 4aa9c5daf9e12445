"""The examples as a reader runs them: in processes that may talk to loopback only."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GUARD = Path(__file__).parents[1] / "loopback_only"


ONE_BY_ONE = """
import os, runpy, sys
for path in sys.argv[1:]:
    sys.path[0] = os.path.dirname(path)
    runpy.run_path(path, run_name="__main__")
    print(end="\\f", flush=True)
"""


def run(told, *paths):
    """Run some in one process; (what each printed, what they tried to reach beyond loopback)."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(GUARD), *sys.path]),
        "BEYOND_LOOPBACK": str(told),
    }
    ran = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return *ran.stdout.split("\f")[:-1], told.read_text()


@pytest.fixture(scope="module")
def with_engines(tmp_path_factory):
    """What the two examples with engines print, and what they tried to reach; torch is imported once for both."""
    names = ("save_and_hit.py", "push_two_engines.py")
    return run(tmp_path_factory.mktemp("guard") / "beyond", *(ROOT / "examples" / name for name in names))


def answers(text):
    return re.findall(r"answer (.*)", text)


def test_a_saved_prompt_is_loaded_and_answers_the_same(with_engines):
    text, _, beyond = with_engines
    cold, warm, other = answers(text)
    assert cold == warm != other
    assert re.findall(r"(\d+) computed, (nothing|\d+) loaded", text) == [
        ("203", "nothing"),
        ("11", "192"),
        ("10", "192"),
    ]
    assert len(re.findall(r"294,912 bytes, 6 layers.*, verified", text)) == 2
    assert beyond == ""


def test_a_prompt_is_computed_by_one_engine_and_answered_by_another(with_engines):
    _, text, beyond = with_engines
    assert re.search(r"prefill: .* 199 computed, .*, pushed", text)
    assert re.search(r"decode: .* 1 computed, 199 loaded from peer \(319,488 bytes, 6 layers.*, verified\)", text)
    assert "the same answer without a push: True" in text
    assert beyond == ""


def test_an_engine_that_is_no_transformer_uses_the_pool(tmp_path):
    text, beyond = run(tmp_path / "beyond", ROOT / "examples" / "your_own_engine.py")
    assert re.findall(r": (\d+) of 100", text) == ["0", "96", "96"]
    assert len(answers(text)) == 3
    assert len(set(answers(text))) == 1
    assert "nan" not in text
    assert beyond == ""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_tested(path):
    assert len(path.read_text().splitlines()) <= 60
    assert path.name in Path(__file__).read_text()


def test_the_readme_shows_the_library_in_15_lines_that_name_what_exists():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 15
    imports = [node for node in ast.parse(block).body if isinstance(node, ast.ImportFrom)]
    names = [(node.module, name.name) for node in imports for name in node.names]
    assert len(names) >= 4
    exec("\n".join(f"from {module} import {name}" for module, name in names), {})


def test_the_guard_sees_who_leaves_loopback(tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(
        "import socket\n"
        "for call in (lambda: socket.create_connection(('192.0.2.1', 80), 0.1),"
        " lambda: socket.getaddrinfo('example.invalid', 80)):\n"
        "    try:\n        call()\n    except OSError as error:\n        print(error)\n"
    )
    text, beyond = run(tmp_path / "beyond", script)
    assert text.count("beyond loopback") == 2
    assert "192.0.2.1" in beyond
    assert "example.invalid" in beyond
