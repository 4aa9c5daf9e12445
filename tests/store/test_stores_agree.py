"""Whatever is asked of them, in any order, a folder and the reference store hold the same objects."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from layercast.errors import LayercastError
from layercast.store.folder import FolderStore
from layercast.store.memory import MemoryStore
from layercast.testing.faults import FakeClock
from layercast.testing.store_laws import LEASE_S, content, key, put, read_all

NUMBERS = range(8)
some = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True)
steps = st.one_of(
    st.tuples(st.just("put"), some, st.sampled_from([1, 100, 400])),
    st.tuples(st.sampled_from(["read", "hold", "evict"]), some, st.just(0)),
    st.tuples(st.sampled_from(["let go", "later", "begin", "commit", "revoke"]), st.just([0]), st.just(0)),
)


class Subject:
    """A store and the handles that are open on it."""

    def __init__(self, store, clock):
        self.store, self.clock, self.reads, self.write = store, clock, [], None

    def do(self, what, numbers, size):
        """What one step gives: bytes, flags, or the error's name."""
        names = [key(n) for n in numbers]
        try:
            match what:
                case "put":
                    put(self.store, *numbers, size=size)
                case "read" | "hold":
                    read = self.store.open_read(names, LEASE_S)
                    self.reads.append(read)
                    found = [read_all(read, index) for index in range(len(names))]
                    if what == "read":
                        self.reads.pop().close()
                    assert all(data == content(n, len(data)) for n, data in zip(numbers, found, strict=True))
                    return found
                case "evict":
                    return self.store.evict(names)
                case "let go" if self.reads:
                    self.reads.pop(0).close()
                case "later":
                    self.clock.advance(LEASE_S / 2)
                case "begin" if self.write is None:
                    self.write = self.store.open_write([key(20)], [300])
                    self.write.write(0, 0, content(20, 300))
                case "commit" | "revoke" if self.write is not None:
                    write, self.write = self.write, None
                    getattr(write, what)()
        except LayercastError as error:
            return type(error).__name__
        return None

    @property
    def there(self):
        return self.store.present([key(n) for n in (*NUMBERS, 20)])


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=40))
def test_a_folder_holds_what_the_reference_store_holds(program):
    with tempfile.TemporaryDirectory() as folder:
        clocks = FakeClock(), FakeClock()
        one = Subject(MemoryStore(1000, clocks[0]), clocks[0])
        other = Subject(FolderStore(Path(folder) / "kv", 1000, clocks[1]), clocks[1])
        for step in program:
            assert one.do(*step) == other.do(*step)
            assert one.there == other.there
            assert one.store.used == other.store._ledger.used
        for subject in (one, other):
            for read in subject.reads:
                read.close()
            subject.store.close()
