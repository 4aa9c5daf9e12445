"""The thread beside the others: jobs in turn, and an end that nobody has to wait for."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from layercast.errors import Refused
from layercast.sidethread import SideThread


def test_jobs_run_in_turn_on_one_thread_that_begins_with_the_first():
    before, side = threading.active_count(), SideThread("layercast-test")
    assert threading.active_count() == before
    seen = [side.submit(lambda number: (number, threading.current_thread().name), number) for number in range(3)]
    assert [job.result(5) for job in seen] == [(number, "layercast-test") for number in range(3)]
    side.close()
    side.join()
    assert threading.active_count() == before


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_job_that_fails_fails_alone(error):
    side = SideThread("layercast-test")

    def fail():
        raise error

    with pytest.raises(error):
        side.submit(fail).result(5)
    assert side.submit(int).result(5) == 0
    side.close()
    side.join()


@pytest.mark.parametrize("drop", [True, False])
def test_once_closed_it_takes_nothing_new_and_ends_with_or_without_what_is_queued(drop):
    side, held, begun = SideThread("layercast-test"), threading.Event(), threading.Event()
    under_way = side.submit(lambda: (begun.set(), held.wait(5)))
    queued = side.submit(int)
    assert begun.wait(5)
    side.close()
    side.close(drop)
    with pytest.raises(Refused):
        side.submit(int)
    held.set()
    side.join()
    assert under_way.result(0)[1]
    if drop:
        with pytest.raises(CancelledError):
            queued.result(0)
    else:
        assert queued.result(0) == 0


def test_one_that_was_never_used_ends_too():
    side = SideThread("layercast-test")
    side.close(drop=True)
    side.join()


STUCK = """
import sys, threading, time
from pathlib import Path
from layercast.control.backing import Backing
from layercast.control.directory import Directory
from layercast.errors import DeadlineExceeded
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.store.folder import FolderStore

class Stuck(FolderStore):
    def present(self, keys):
        threading.Event().wait()

stores = [Stuck(Path(sys.argv[1]), 1 << 16)]
backing = Backing(Directory([16], time.monotonic, 10.0), stores, (GroupSpec("full", GroupKind.FULL, 4, (0,)),), 0)
backing.seek("r", [[bytes(32)]], 5)
try:
    backing.close(0.01)
except DeadlineExceeded:
    print("given up")
"""


def test_a_store_that_never_answers_keeps_no_process_from_ending(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)], check=False, timeout=20, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr
