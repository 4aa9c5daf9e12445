"""Objects as files of a folder, which several processes may share; the least recently used are removed first.

A file is a header (magic, length, digest of key and bytes) and the object. It is written under a temporary name and
renamed, so a reader finds it whole or not at all, and what is short or damaged counts as absent and is removed. Times
of files tell what was used last, to every process; each counts what the others wrote now and then. Does not know what
the bytes are.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from threading import Lock

import xxhash

from layercast.errors import BadTransition, Corrupt, FolderLost, Full, LayercastError, Missing, Refused
from layercast.store.base import Store
from layercast.store.handles import ReadHandle, WriteHandle
from layercast.store.ledger import Entry, Ledger

MAGIC = b"layercast file 1"
HEADER = Struct("<16sQ16s")
"""Magic, bytes of the object, xxh3-128 of its key and its bytes."""
UNFINISHED = ".part"
RECOUNT = 16
"""A part of the capacity: after writing so much, what other processes have written and used is looked at."""
NAMED_KEYS = 3
"""How many absent keys a message spells out."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderStore(Store):
    """At most `capacity` bytes of objects in `folder`, those being written included. clock: seconds, for leases.

    The folder is made if need be, for its owner alone, and nothing is written once another disk lies there. Raises
    FolderLost where it can't be read.
    """

    def __init__(self, folder: Path, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._lock = Lock()
        self._ledger = Ledger(capacity, clock)
        self._closed = False
        self._uncounted = 0
        """Bytes written since the folder was last looked at."""
        try:
            self._recount(_remove_if_left)
            self._disk = os.stat(folder).st_dev
        except OSError as error:
            raise _typed(error, folder) from error

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Store.present`."""
        self._check_open()
        return [os.path.exists(self._file(key)) for key in keys]

    def open_write(self, keys: Sequence[bytes], sizes: Sequence[int]) -> WriteHandle:
        """See `Store.open_write`. Raises FolderLost too; a disk that is full shows at the commit, as Full."""
        if len(keys) != len(sizes) or len(set(keys)) != len(keys) or any(size < 1 for size in sizes):
            raise Refused(f"{len(set(keys))} distinct keys of {len(keys)}, {len(sizes)} sizes; each at least 1 byte")
        total = sum(sizes)
        try:
            with self._lock:
                self._check_open()
                if self._uncounted > self._ledger.capacity // RECOUNT:
                    self._recount()
                for key in self._ledger.room_for(total):
                    self._drop(key)
                self._ledger.used += total
                self._uncounted += total
        except OSError as error:
            raise _typed(error, self.folder) from error
        return WriteHandle(keys, sizes, self._admit, lambda: self._give_back(total))

    def open_read(self, keys: Sequence[bytes], lease_s: float) -> ReadHandle:
        """See `Store.open_read`. Another process may evict an object during the lease; then it is Missing."""
        with self._lock:
            self._check_open()
            sizes = {key: self._size(key) for key in keys}
            absent = [key for key in keys if sizes[key] is None]
            if absent:
                raise _missing(absent, len(keys))
            found = tuple(sizes[key] or 0 for key in keys)
            for key, size in zip(reversed(keys), reversed(found), strict=True):  # the first last to go
                if key not in self._ledger.entries:
                    self._ledger.add(key, size)
                with suppress(OSError):  # where only reading is allowed, others do not learn that it was used
                    os.utime(self._file(key), ns=(time.time_ns(),) * 2)
            lease, clock = object(), self._ledger.clock
            deadline = clock() + lease_s
            self._ledger.lease(lease, keys[::-1], deadline)
        return ReadHandle(
            found,
            deadline,
            clock,
            fetch=lambda index: self._load(keys[index], found[index]),
            let_go=lambda: self._let_go(lease, keys),
        )

    def evict(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Store.evict`."""
        with self._lock:
            self._check_open()
            for key in keys:
                if not self._ledger.held(key):
                    self._discard(key)
        return [not there for there in self.present(keys)]

    def close(self) -> None:
        """See `Store.close`. The files stay."""
        with self._lock:
            self._closed = True

    def _admit(self, keys: Sequence[bytes], objects: Sequence[bytearray]) -> None:
        """Write whole objects, then rename them; the first commit of a key stays. Raises Full, FolderLost."""
        written: list[tuple[str, int]] = []
        try:
            with self._lock:
                self._check_open()
            for key, data in zip(keys, objects, strict=True):
                written.append(self._written(key, data))
            with self._lock:
                self._check_open()
                for key, data, (unfinished, _) in zip(keys, objects, written, strict=True):
                    if not os.path.exists(self._file(key)):
                        os.utime(unfinished, ns=(time.time_ns(),) * 2)
                        os.rename(unfinished, self._file(key))
                        self._ledger.drop(key)
                        self._ledger.add(key, len(data))
        except OSError as error:
            raise _typed(error, self.folder) from error
        finally:
            self._give_back(sum(map(len, objects)))
            for unfinished, file in written:
                _let_go_of(unfinished, file)

    def _give_back(self, size: int) -> None:
        """End the room of a batch, written or not."""
        with self._lock:
            self._ledger.used -= size

    def _let_go(self, lease: object, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._ledger.end(lease, keys)

    def _check_open(self) -> None:
        if self._closed:
            raise BadTransition("the store is closed; open another one")

    def _written(self, key: bytes, data: bytearray) -> tuple[str, int]:
        """A file with an object, not yet under its name, and its descriptor, whose lock says that a writer lives."""
        name, file = self._begun(self._file(key))
        try:
            for part in (HEADER.pack(MAGIC, len(data), _digest(key, data)), data):
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(file, rest) :]
        except BaseException:
            _let_go_of(name, file)
            raise
        return name, file

    def _begun(self, final: str) -> tuple[str, int]:
        """An empty unfinished file, locked. One that a store which starts just now takes for left behind is lost to it,
        and another one is begun."""
        os.makedirs(os.path.dirname(final), mode=0o700, exist_ok=True)
        if os.stat(self.folder).st_dev != self._disk:  # an unmounted one's place is on a disk that nobody named
            raise FolderLost(f"{self.folder}: is on another disk than at the start; mount that again, or restart")
        while True:
            name = f"{final}.{secrets.token_hex(8)}{UNFINISHED}"
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = not os.path.exists(name)
            except BlockingIOError:  # that store is about to remove it
                taken = True
            except OSError:  # some shared folders know no locks: nothing is cleaned up there
                taken = False
            if not taken:
                return name, file
            _let_go_of(name, file)

    def _load(self, key: bytes, size: int) -> bytes:
        """An object, checked. Raises Missing, or Corrupt having removed it, or FolderLost."""
        with self._lock:
            self._check_open()
        try:
            with open(self._file(key), "rb") as file:
                magic, length, digest = HEADER.unpack(file.read(HEADER.size).ljust(HEADER.size, b"\0"))
                data = file.read(size + 1)
        except FileNotFoundError:
            raise _missing([key], 1) from None
        except OSError as error:
            raise _typed(error, self.folder) from error
        if magic != MAGIC or length != len(data) or length != size or digest != _digest(key, data):
            with self._lock:
                self._discard(key)
            raise Corrupt(f"{self._file(key)} is short or damaged, and was removed; recompute what it held")
        return data

    def _size(self, key: bytes) -> int | None:
        """Bytes of an object, by its header; None if it is absent, or removed for not being as long as that says."""
        try:
            with open(self._file(key), "rb", buffering=0) as file:
                magic, length, _ = HEADER.unpack(file.read(HEADER.size).ljust(HEADER.size, b"\0"))
                if magic == MAGIC and 0 < length == os.fstat(file.fileno()).st_size - HEADER.size:
                    return int(length)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _typed(error, self.folder) from error
        self._discard(key)
        return None

    def _recount(self, unfinished: Callable[[str], None] = lambda path: None) -> None:
        """Look at the folder: what is there, what was used last. unfinished: is shown the files being written."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: list[tuple[int, bytes, int]] = []
        for part in [part.path for part in os.scandir(self.folder) if part.is_dir()]:
            for file in os.scandir(part):
                with suppress(FileNotFoundError):  # another process is quicker
                    if file.name.endswith(UNFINISHED):
                        unfinished(file.path)
                    elif (key := _key(file.name)) is not None:
                        facts = file.stat()
                        found.append((facts.st_mtime_ns, key, max(0, facts.st_size - HEADER.size)))
        ledger, before = self._ledger, self._ledger.entries
        ledger.used += sum(size for _, _, size in found) - sum(entry.size for entry in before.values())
        leases = {key: entry.leases for key, entry in before.items() if entry.leases}
        before.clear()
        before.update((key, Entry(size, leases.get(key, {}))) for _, key, size in sorted(found))
        self._uncounted = 0

    def _discard(self, key: bytes) -> None:
        """Remove an object, where that is allowed."""
        with suppress(OSError):
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._file(key))
        self._ledger.drop(key)

    def _file(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.folder}/{name[:2]}/{name}"


def _digest(key: bytes, data: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(data)
    return digest.digest()


def _key(name: str) -> bytes | None:
    """The key that a file is named after, if it is one."""
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def _remove_if_left(path: str) -> None:
    """Remove an unfinished file unless its writer lives, and so holds its lock; one just begun is begun anew.

    Where only reading is allowed it stays.
    """
    with suppress(OSError):
        file = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(file)


def _let_go_of(unfinished: str, file: int) -> None:
    """Close a file and remove it, if it still has that name, as far as the disk lets us: the next store to start
    removes what is left, and what has its final name by now is checked when it is read."""
    with suppress(OSError):
        os.close(file)
    with suppress(OSError):
        os.unlink(unfinished)


def _typed(error: OSError, folder: Path) -> LayercastError:
    """What an error of the system means: no room, or a folder that can't be used."""
    if error.errno in _NO_ROOM:
        return Full(f"{folder}: {error.strerror}; nothing more is kept there until there is room")
    return FolderLost(f"{folder}: {error.strerror}; see that it is there and may be read and written")


def _missing(absent: Sequence[bytes], of: int) -> Missing:
    """The error that names absent keys."""
    named = ", ".join(key.hex() for key in absent[:NAMED_KEYS])
    more = f" and {len(absent) - NAMED_KEYS} more" if len(absent) > NAMED_KEYS else ""
    return Missing(f"{len(absent)} of {of} objects are not in the store: {named}{more}")
