"""A shared folder and what may happen to it, in real engines: no wrong token, no hang, nothing left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from layercast.store.folder import UNFINISHED

pytestmark = pytest.mark.slow
DRIVE = str(Path(__file__).parent / "drive_folder.py")
CASES = ["whole", "damaged", "removed", "late", "narrow", "small"]


@pytest.fixture(scope="module")
def facts(drive, tmp_path_factory):
    return drive("folder_faults", str(tmp_path_factory.mktemp("shared")))


def start(models, *arguments):
    return subprocess.Popen(
        [sys.executable, DRIVE, str(models), *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def said(process):
    out, _ = process.communicate(timeout=300)
    (line,) = [line for line in out.splitlines() if line.startswith("FACTS ")]
    return json.loads(line.removeprefix("FACTS "))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_an_engine_without_a_connector(facts, name):
    assert [run["tokens"] for run in facts[name]["rounds"]] == [facts["plain"]] * len(facts[name]["rounds"])
    assert {end for run in facts[name]["rounds"] for end in run["ends"]} <= {"landed"}


@pytest.mark.parametrize("name", [*CASES, "other_weights"])
def test_nothing_is_left(facts, name):
    run = facts[name]
    assert (run["threads"], run["unfinished"], facts["descriptors"]) == ([], 0, 0)
    assert run["drained"]["idle"]
    assert (run["drained"]["held"], run["drained"]["requests"]) == (0, 0)
    assert run["drained"]["free_blocks"] == run["blocks"]


def test_damage_costs_hits_and_what_is_whole_is_still_loaded(facts):
    damaged = facts["damaged"]
    assert len(damaged["rounds"]) == facts["seeds"]
    assert damaged["stats"]["transfers disk read failed"] > facts["seeds"] / 2
    assert damaged["stats"]["hit_tokens disk"] > 0


def test_a_read_that_takes_too_long_is_waited_for_no_longer_than_its_deadline(facts):
    late = facts["late"]
    assert [sum(run["cached"]) for run in late["rounds"]] == [0, 192 + 32 + 480]
    assert late["seconds"] < 10


def test_a_folder_holds_no_more_than_it_may(facts):
    assert facts["narrow"]["files"] <= 3


def test_other_weights_at_the_same_place_find_nothing(facts):
    (run,) = facts["other_weights"]["rounds"]
    assert run["cached"] == [0] * 5
    assert "bytes disk read" not in facts["other_weights"]["stats"]


def test_a_producer_killed_while_it_writes_leaves_whole_blocks_and_nothing_unfinished(models, drive, tmp_path):
    kv = str(tmp_path / "kv")
    plain = drive("folder", "plain", str(tmp_path / "other"))["plain"]
    killed = start(models, "kv_producer", kv, "dies_after=7")
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(Path(kv).rglob(f"*{UNFINISHED}"))) == 1
    consumer = drive("folder", "kv_consumer", kv)
    assert [run["replies"][0]["tokens"] for run in consumer["runs"]] == plain
    assert consumer["stats"]["hit_tokens disk"] == 192, "six blocks of the first prompt, one of another"
    assert not list(Path(kv).rglob(f"*{UNFINISHED}"))


def test_engines_that_save_the_same_blocks_at_once_leave_whole_ones(models, drive, tmp_path):
    kv = str(tmp_path / "kv")
    both = [start(models, "kv_both", kv) for _ in range(2)]
    runs = [said(process) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    consumer = drive("folder", "kv_consumer", kv)
    tokens = [[run["replies"][0]["tokens"] for run in facts["runs"]] for facts in (*runs, consumer)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert consumer["stats"]["hit_tokens disk"] == 192 + 32 + 480
    assert not list(Path(kv).rglob(f"*{UNFINISHED}"))
    assert len(os.listdir(kv)) == 1
