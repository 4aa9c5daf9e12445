"""The store over a folder: the laws of every store, and what files, other processes and a disk may do to it."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from tempfile import TemporaryDirectory

import pytest

from layercast.errors import Corrupt, DeadlineExceeded, FolderLost, Missing
from layercast.store.folder import HEADER, UNFINISHED, FolderStore
from layercast.testing.clock import FakeClock
from layercast.testing.store_laws import CAPACITY, LEASE_S, StoreLaws, content, get, key, put, there


class TestFolderStore(StoreLaws):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path / "kv"
        files = len(os.listdir("/proc/self/fd"))
        yield
        assert len(os.listdir("/proc/self/fd")) == files
        assert not list(self.folder.rglob(f"*{UNFINISHED}"))

    def make_store(self, capacity, clock):
        return FolderStore(self.folder, capacity, clock)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


def file_of(folder, number):
    return folder / key(number).hex()[:2] / key(number).hex()


def test_what_another_process_wrote_is_seen_and_read(folder):
    store = FolderStore(folder, CAPACITY)
    assert there(store, 1) == [False]
    writer = multiprocessing.get_context("spawn").Process(target=_write_elsewhere, args=(folder, 1, 2))
    writer.start()
    writer.join(30)
    assert writer.exitcode == 0
    assert there(store, 1, 2, 3) == [True, True, False]
    assert get(store, 2) == content(2, 1024)


def _write_elsewhere(folder, *numbers):
    put(FolderStore(folder, CAPACITY), *numbers)


def test_objects_outlive_their_store(folder):
    put(FolderStore(folder, CAPACITY), 1)
    assert get(FolderStore(folder, CAPACITY), 1) == content(1, 1024)


@pytest.mark.parametrize("at", [0, 16, 24, HEADER.size, HEADER.size + 500, HEADER.size + 1023])
def test_a_flipped_byte_is_never_read(folder, at):
    """Anywhere in the file: the object is lost, and may be written again."""
    store = FolderStore(folder, CAPACITY)
    put(store, 1)
    file = file_of(folder, 1)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(Missing), store.open_read([key(1)], LEASE_S) as read:
        read.read(0, 0, bytearray(8))
    assert there(store, 1) == [False]
    put(store, 1)
    assert get(store, 1) == content(1, 1024)


@pytest.mark.parametrize("size", [0, 1, HEADER.size, HEADER.size + 1, HEADER.size + 1023, HEADER.size + 2000])
def test_a_file_of_another_length_is_never_read(folder, size):
    store = FolderStore(folder, CAPACITY)
    put(store, 1)
    file = file_of(folder, 1)
    file.write_bytes(file.read_bytes()[:size].ljust(size, b"x"))
    with pytest.raises(Missing), store.open_read([key(1)], LEASE_S) as read:
        read.read(0, 0, bytearray(1))


def test_an_object_under_another_objects_name_is_never_read(folder):
    store = FolderStore(folder, CAPACITY)
    put(store, 1, 2)
    file_of(folder, 1).write_bytes(file_of(folder, 2).read_bytes())
    with store.open_read([key(1)], LEASE_S) as read, pytest.raises(Corrupt):
        read.read(0, 0, bytearray(8))


def test_a_damaged_object_takes_no_room(folder):
    store = FolderStore(folder, CAPACITY)
    put(store, 1, 2, 3, 4)
    file_of(folder, 1).write_bytes(b"")
    with pytest.raises(Missing):
        get(store, 1)
    put(FolderStore(folder, CAPACITY), 1)
    assert there(store, 2, 3, 4) == [True] * 3


def test_what_others_write_counts_and_goes_when_it_is_oldest(folder):
    """Each of two stores writes twice the capacity: together they stay near it."""
    stores = [FolderStore(folder, CAPACITY) for _ in range(2)]
    for number in range(16):
        put(stores[number % 2], number)
    left = [number for number in range(16) if there(stores[0], number) == [True]]
    assert left == [12, 13, 14, 15]


def test_a_read_keeps_an_object_from_going_first_for_every_store(folder):
    one, other = (FolderStore(folder, CAPACITY) for _ in range(2))
    put(one, 1)
    put(one, 2, 3, 4)
    get(other, 1)
    put(FolderStore(folder, CAPACITY), 5)
    assert there(one, 1, 2, 3, 4, 5) == [True, False, True, True, True]


KILLED = """
import os, sys
from pathlib import Path
from layercast.store.folder import FolderStore
from layercast.testing.store_laws import key
os.rename = lambda *names: os.kill(os.getpid(), 9)
with FolderStore(Path(sys.argv[1]), 4096).open_write([key(1), key(2)], [1024, 1024]) as handle:
    handle.write(0, 0, bytes(1024)); handle.write(1, 0, bytes(1024)); handle.commit()
"""


def test_what_a_killed_writer_left_is_removed_and_was_never_seen(folder):
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list(folder.rglob(f"*{UNFINISHED}"))) == 2
    store = FolderStore(folder, CAPACITY)
    assert there(store, 1, 2) == [False, False]
    assert not list(folder.rglob(f"*{UNFINISHED}"))
    put(store, 3, size=CAPACITY)


def test_what_a_living_writer_writes_is_left_alone(folder):
    store = FolderStore(folder, CAPACITY)
    name, file = store._written(key(1), bytearray(8))
    FolderStore(folder, CAPACITY)
    assert os.path.exists(name)
    os.close(file)
    FolderStore(folder, CAPACITY)
    assert not os.path.exists(name)


@pytest.mark.parametrize("locked_first", [True, False], ids=["before its writer", "before its writer tries"])
def test_a_store_that_starts_while_a_file_is_begun_costs_nobody_that_object(folder, monkeypatch, locked_first):
    """It takes the file for one that a killed writer left, as that is not locked yet."""
    store, lock, met = FolderStore(folder, CAPACITY), fcntl.flock, []

    def flock(file, how):
        if not met:
            (left,) = folder.rglob(f"*{UNFINISHED}")
            met.append(left)
            if locked_first:
                other = os.open(left, os.O_RDWR)
                lock(other, how)
                with pytest.raises(BlockingIOError):
                    lock(file, how)
                os.unlink(left)
                os.close(other)
                raise BlockingIOError
            FolderStore(folder, CAPACITY)
            assert not left.exists()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    put(store, 1)
    assert met
    assert get(store, 1) == content(1, 1024)


@pytest.mark.parametrize("fails", ["write", "rename"])
def test_a_disk_that_may_not_be_written_any_more_is_a_typed_failure_and_keeps_no_file_open(folder, monkeypatch, fails):
    """As when the system finds it damaged and mounts it anew, for reading only: nothing can be removed then, either."""
    store, files = FolderStore(folder, CAPACITY), len(os.listdir("/proc/self/fd"))

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as broken:
        for call in (fails, "unlink"):
            broken.setattr(os, call, refuse)
        for _ in range(3):
            with pytest.raises(FolderLost, match="Read-only"):
                put(store, 1, 2)
    assert len(os.listdir("/proc/self/fd")) == files
    assert store._ledger.used == 0
    put(FolderStore(folder, CAPACITY), 3, size=CAPACITY)
    assert not list(folder.rglob(f"*{UNFINISHED}"))


def test_a_folder_that_is_taken_away_is_absence_and_comes_back_with_the_next_write(folder):
    store = FolderStore(folder, CAPACITY)
    put(store, 1)
    read = store.open_read([key(1)], LEASE_S)
    folder.rename(folder.with_name("gone"))
    assert there(store, 1) == [False]
    with pytest.raises(Missing):
        read.read(0, 0, bytearray(8))
    put(store, 2)
    assert get(store, 2) == content(2, 1024)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no second disk that anybody may write to")
def test_nothing_is_written_to_another_disk_that_lies_where_the_folder_was(tmp_path):
    """As when a disk is unmounted: its place is on the one below it."""
    (tmp_path / "mounted").mkdir()
    (tmp_path / "place").symlink_to(tmp_path / "mounted")
    store = FolderStore(tmp_path / "place", CAPACITY)
    put(store, 1)
    with TemporaryDirectory(dir="/dev/shm") as below:
        assert os.stat(below).st_dev != os.stat(tmp_path).st_dev
        (tmp_path / "place").unlink()
        (tmp_path / "place").symlink_to(below)
        with pytest.raises(FolderLost, match="another disk than at the start; mount that again"):
            put(store, 2)
        assert not [file for _, _, files in os.walk(below) for file in files]
    (tmp_path / "place").unlink()
    (tmp_path / "place").symlink_to(tmp_path / "mounted")
    put(store, 2)
    assert there(store, 1, 2) == [True, True]


def test_a_folder_that_became_a_file_is_a_typed_failure(folder):
    store = FolderStore(folder, CAPACITY)
    put(store, 1)
    folder.rename(folder.with_name("gone"))
    folder.write_bytes(b"")
    assert there(store, 1) == [False]
    with pytest.raises(FolderLost, match="see that it is there"):
        put(store, 2)
    with pytest.raises((FolderLost, Missing)):
        get(store, 1)


def test_a_folder_that_can_not_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FolderLost, match="file"):
        FolderStore(tmp_path / "file" / "kv", CAPACITY)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_only_be_read_is_read(folder):
    put(FolderStore(folder, CAPACITY), 1)
    file_of(folder, 1).parent.chmod(0o500)
    store = FolderStore(folder, CAPACITY)
    assert get(store, 1) == content(1, 1024)
    with pytest.raises(FolderLost, match="Permission"):
        put(store, 257)
    file_of(folder, 1).parent.chmod(0o700)


FULL = """
import resource, signal, sys
from pathlib import Path
from layercast.errors import Full
from layercast.store.folder import FolderStore
from layercast.testing.store_laws import get, put, there, content
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = FolderStore(Path(sys.argv[1]), 1 << 20)
put(store, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    put(store, 2, 3, size=10_000)
except Full:
    assert store._ledger.used == 1024, store._ledger.used
    assert there(store, 1, 2, 3) == [True, False, False] and get(store, 1) == content(1, 1024)
    print("full")
"""


def test_a_disk_that_fills_up_during_a_write_leaves_nothing_of_it(folder):
    """The system refuses the file half-way, here by a limit on its size."""
    done = subprocess.run([sys.executable, "-c", FULL, str(folder)], check=False, timeout=60, capture_output=True)
    assert done.stdout == b"full\n", done.stderr
    assert not list(folder.rglob(f"*{UNFINISHED}"))


SMALL_DISK = """
import sys
from pathlib import Path
from layercast.errors import Full
from layercast.store.folder import FolderStore
from layercast.testing.store_laws import content, get, key, put, there
store, kept = FolderStore(Path(sys.argv[1]) / "kv", 1 << 30), 0
try:
    while True:
        put(store, kept, size=100_000)
        kept += 1
except Full as error:
    assert "No space" in str(error), error
assert there(store, *range(kept + 1)) == [True] * kept + [False]
assert all(get(store, number) == content(number, 100_000) for number in range(kept))
store.evict([key(0), key(1)])
put(store, 500, size=100_000)
assert get(store, 500) == content(500, 100_000)
print("kept", kept)
"""


def test_a_disk_that_is_full_keeps_what_it_has_and_takes_more_once_there_is_room(tmp_path):
    """A file system of one MiB, in a namespace of its own."""
    inside = 'mount -t tmpfs -o size=1m small "$2" && exec "$0" -c "$1" "$2"'
    command = ["unshare", "-rm", "sh", "-c", inside, sys.executable, SMALL_DISK, str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system lets nobody mount a file system of their own")
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in {"kept 8", "kept 9", "kept 10"}


def test_files_are_for_their_owner_alone(folder):
    put(FolderStore(folder, CAPACITY), 1)
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]} == {0}


def test_a_read_that_outlives_its_lease_is_not_trusted(folder):
    """The lease ends between the check before the copy and the one after it."""
    clock, times = FakeClock(), iter([0.0, LEASE_S])
    store = FolderStore(folder, CAPACITY, lambda: next(times) if reading else clock())
    reading = False
    put(store, 1)
    with store.open_read([key(1)], LEASE_S) as read:
        reading = True
        with pytest.raises(DeadlineExceeded):
            read.read(0, 0, bytearray(8))


def test_an_unfinished_file_that_may_not_be_opened_to_write_is_nobodys_trouble(folder):
    """As on a disk that a consumer may only read; root may open any file to write, but no folder."""
    put(FolderStore(folder, CAPACITY), 1)
    unfinished = file_of(folder, 1).with_name(f"{key(2).hex()}.0{UNFINISHED}")
    unfinished.mkdir()
    assert get(FolderStore(folder, CAPACITY), 1) == content(1, 1024)
    unfinished.rmdir()
