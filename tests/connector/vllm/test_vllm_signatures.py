"""Our hooks against the signatures of vLLM's connector base class, version by version."""

import inspect
import json
import re
from pathlib import Path

import pytest
from signatures import FILE, signatures

pytest.importorskip("vllm")

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from layercast.connector.vllm.connector import LayercastConnector

KNOWN = json.loads(FILE.read_text())
WORKS_WITH = ["0.26.0", "0.29.0", "0.32.0", "0.33.0"]
NEWER = {"get_transfer_results", "get_external_cache_hit_sources"}
"""Hooks of ours that 0.26 and 0.29 do not call; they ask `get_finished` instead of the first."""
OURS = {
    name
    for kind in LayercastConnector.__mro__
    if kind.__module__.startswith("layercast.")
    for name, value in vars(kind).items()
    if not name.startswith("_") and (callable(value) or isinstance(value, property | classmethod))
}


def accepts(ours, parameters):
    """Whether a method can be called with these parameters."""
    has = inspect.signature(ours).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in has.values())
    wanted = [name.rstrip("?") for name in parameters if not name.startswith("**")]
    known = [name for name, p in has.items() if name != "self" and p.kind is not p.VAR_KEYWORD]
    return wanted[: len(known)] == known and (len(wanted) <= len(known) or anything)


def test_the_file_says_what_the_installed_version_says():
    version = re.match(r"\d+\.\d+\.\d+", vllm.__version__)[0]
    if version not in KNOWN:
        pytest.skip(f"signatures of {version} are not recorded")
    assert signatures(Path(base.__file__).read_text()) == KNOWN[version]


@pytest.mark.parametrize("version", WORKS_WITH)
def test_every_hook_takes_what_this_version_gives(version):
    theirs = KNOWN[version]
    shared = sorted(OURS & set(theirs))
    assert len(shared) >= 20
    for name in shared:
        if theirs[name]["kind"] == "method":
            assert accepts(getattr(LayercastConnector, name), theirs[name]["parameters"]), name


@pytest.mark.parametrize("version", WORKS_WITH)
def test_nothing_abstract_is_left(version):
    assert {name for name, has in KNOWN[version].items() if has["abstract"]} <= OURS


@pytest.mark.parametrize("version", ["0.26.0", "0.29.0"])
def test_what_older_versions_lack_is_known(version):
    called = OURS & set(KNOWN["0.32.0"])
    assert called - set(KNOWN[version]) - {"supports_divergent_local_hybrid_hits"} == NEWER
