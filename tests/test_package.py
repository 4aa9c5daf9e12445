"""What holds for every file of the package: nothing of a stranger is ever run, and nobody is called by surprise."""

import ast
from pathlib import Path

import pytest

import layercast

FILES = sorted(Path(layercast.__file__).parent.rglob("*.py"))
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLERS = {"http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "huggingface_hub", "ftplib", "smtplib"}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_all_files_are_looked_at():
    assert len(FILES) > 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_that_runs_bytes_of_a_stranger_or_calls_the_network_is_imported(path):
    """Public reports: GHSA-hj4w-hm2g-p6w5, CVE-2026-26220: whoever reached the KV port ran code, by pickle."""
    tree = ast.parse(path.read_text())
    assert not set(imported(tree)) & (UNSAFE | CALLERS)
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not calls & {"eval", "exec", "compile"}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & {"recv_pyobj", "send_pyobj"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_default_binds_beyond_loopback(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arguments):
            defaults = [d for d in (*node.defaults, *node.kw_defaults) if isinstance(d, ast.Constant)]
            assert not {d.value for d in defaults} & {"0.0.0.0", "::"}
