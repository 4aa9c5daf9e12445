"""Whatever is asked of it, in any order, a folder holds what a plain account of the laws holds."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from layercast.errors import LayercastError
from layercast.store.folder import FolderStore
from layercast.testing.clock import FakeClock
from layercast.testing.store_laws import LEASE_S, content, key, put, read_all

CAPACITY = 1000
NUMBERS = range(8)
ASIDE, ASIDE_SIZE = 20, 300
"""The object of the write that stays open between steps."""
some = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True)
steps = st.one_of(
    st.tuples(st.just("put"), some, st.sampled_from([1, 100, 400])),
    st.tuples(st.sampled_from(["read", "hold", "evict"]), some, st.just(0)),
    st.tuples(st.sampled_from(["let go", "later", "begin", "commit", "revoke"]), st.just([0]), st.just(0)),
)


class Account:
    """What a store has to hold: sizes by number, the next to go first; the open reads, the open write, the time."""

    def __init__(self):
        self.sizes, self.reads, self.writing, self.now = {}, [], False, 0.0

    @property
    def used(self):
        return sum(self.sizes.values()) + ASIDE_SIZE * self.writing

    def held(self, number):
        return any(number in numbers and deadline > self.now for numbers, deadline in self.reads)

    def makes_room(self, size):
        """Whether there is room, by dropping what nobody holds; nothing goes where that is not enough."""
        excess, victims = self.used + size - CAPACITY, []
        for number in self.sizes:
            if excess > 0 and not self.held(number):
                victims.append(number)
                excess -= self.sizes[number]
        for number in victims if excess <= 0 else ():
            del self.sizes[number]
        return excess <= 0

    def do(self, what, numbers, size):
        return getattr(self, what.replace(" ", "_"))(numbers, size)

    def put(self, numbers, size):
        if not self.makes_room(size * len(numbers)):
            return "Full"
        self.sizes |= {number: size for number in numbers if number not in self.sizes}
        return None

    def read(self, numbers, _size):
        if not self.sizes.keys() >= set(numbers):
            return "Missing"
        for number in reversed(numbers):
            self.sizes[number] = self.sizes.pop(number)
        return [content(number, self.sizes[number]) for number in numbers]

    def hold(self, numbers, size):
        found = self.read(numbers, size)
        if found != "Missing":
            self.reads.append((numbers, self.now + LEASE_S))
        return found

    def evict(self, numbers, _size):
        self.sizes = {n: size for n, size in self.sizes.items() if n not in numbers or self.held(n)}
        return [number not in self.sizes for number in numbers]

    def let_go(self, *_):
        del self.reads[:1]

    def later(self, *_):
        self.now += LEASE_S / 2

    def begin(self, *_):
        if not self.writing and not self.makes_room(ASIDE_SIZE):
            return "Full"
        self.writing = True
        return None

    def commit(self, *_):
        if self.writing:
            self.sizes.setdefault(ASIDE, ASIDE_SIZE)
        self.writing = False

    def revoke(self, *_):
        self.writing = False


class Subject:
    """A store and the handles that are open on it."""

    def __init__(self, folder):
        self.clock, self.reads, self.write = FakeClock(), [], None
        self.store = FolderStore(folder, CAPACITY, self.clock)

    def do(self, what, numbers, size):
        """What one step gives: bytes, flags, or the error's name."""
        names = [key(n) for n in numbers]
        try:
            match what:
                case "put":
                    put(self.store, *numbers, size=size)
                case "read" | "hold":
                    read = self.store.open_read(names, LEASE_S)
                    found = [read_all(read, index) for index in range(len(names))]
                    if what == "hold":
                        self.reads.append(read)
                    else:
                        read.close()
                    return found
                case "evict":
                    return self.store.evict(names)
                case "let go" if self.reads:
                    self.reads.pop(0).close()
                case "later":
                    self.clock.advance(LEASE_S / 2)
                case "begin" if self.write is None:
                    self.write = self.store.open_write([key(ASIDE)], [ASIDE_SIZE])
                    self.write.write(0, 0, content(ASIDE, ASIDE_SIZE))
                case "commit" | "revoke" if self.write is not None:
                    write, self.write = self.write, None
                    getattr(write, what)()
        except LayercastError as error:
            return type(error).__name__
        return None


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=40))
def test_a_folder_holds_what_the_laws_say(program):
    with tempfile.TemporaryDirectory() as folder:
        account, subject = Account(), Subject(Path(folder) / "kv")
        for step in program:
            assert subject.do(*step) == account.do(*step)
            there = [number in account.sizes for number in (*NUMBERS, ASIDE)]
            assert subject.store.present([key(n) for n in (*NUMBERS, ASIDE)]) == there
            assert subject.store._ledger.used == account.used
        for read in subject.reads:
            read.close()
        subject.store.close()
