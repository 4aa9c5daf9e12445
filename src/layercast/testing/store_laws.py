"""The laws of a store, as tests: a backend is accepted when its subclass of `StoreLaws` passes unmodified.

    class TestMyStore(StoreLaws):
        def make_store(self, capacity, clock):
            return MyStore(capacity, clock)

Does not know any backend.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from layercast.errors import BadTransition, DeadlineExceeded, Full, Missing, PeerLost, Refused
from layercast.store.base import Store
from layercast.store.handles import ReadHandle
from layercast.testing.clock import FakeClock

CAPACITY = 4096
LEASE_S = 5.0


def key(number: int) -> bytes:
    """A key of 32 bytes."""
    return number.to_bytes(32, "little")


def content(number: int, size: int) -> bytes:
    """Bytes that differ between numbers and between offsets."""
    return bytes((number * 37 + at * 11 + at // 256) % 251 for at in range(size))


def put(store: Store, *numbers: int, size: int = 1024) -> None:
    """Write and commit one object a number."""
    with store.open_write([key(n) for n in numbers], [size] * len(numbers)) as handle:
        for index, number in enumerate(numbers):
            handle.write(index, 0, content(number, size))
        handle.commit()


def read_all(handle: ReadHandle, index: int) -> bytes:
    """All bytes of one object of a read."""
    buffer = bytearray(handle.sizes[index])
    handle.read(index, 0, buffer)
    return bytes(buffer)


def get(store: Store, number: int) -> bytes:
    """The object of a number."""
    with store.open_read([key(number)], LEASE_S) as handle:
        return read_all(handle, 0)


def there(store: Store, *numbers: int) -> list[bool]:
    """Presence of each number's object."""
    return store.present([key(n) for n in numbers])


class StoreLaws(ABC):
    """Subclass as `class Test...`, give `make_store`, and run with pytest."""

    @abstractmethod
    def make_store(self, capacity: int, clock: Callable[[], float]) -> Store:
        """An empty store that holds `capacity` bytes of objects and reads time from `clock`."""

    @pytest.fixture(name="clock")
    def clock_fixture(self) -> FakeClock:
        """The time of the store under test."""
        return FakeClock()

    @pytest.fixture(name="store")
    def store_fixture(self, clock: FakeClock) -> Iterator[Store]:
        """The store under test, closed at the end."""
        store = self.make_store(CAPACITY, clock)
        yield store
        store.close()

    # ---- visibility ----

    def test_what_was_written_is_read(self, store: Store) -> None:
        """Any sizes, also of one byte, also in one batch."""
        sizes = [1, 7, 1000, 2048]
        with store.open_write([key(n) for n in range(4)], sizes) as handle:
            for index, size in enumerate(sizes):
                handle.write(index, 0, content(index, size))
            handle.commit()
        with store.open_read([key(3), key(0), key(2), key(1)], LEASE_S) as read:
            assert read.sizes == (2048, 1, 1000, 7)
            assert [read_all(read, i) for i in range(4)] == [content(n, sizes[n]) for n in (3, 0, 2, 1)]

    def test_layers_are_ranges_of_one_object_in_any_order(self, store: Store) -> None:
        """One key a block: 16 layers are written last to first, and one layer is read alone."""
        whole = content(5, 1024)
        with store.open_write([key(5)], [1024]) as handle:
            for layer in reversed(range(16)):
                handle.write(0, layer * 64, memoryview(whole)[layer * 64 : (layer + 1) * 64])
                assert there(store, 5) == [False]
            handle.commit()
        one_layer = bytearray(64)
        with store.open_read([key(5)], LEASE_S) as read:
            read.read(0, 7 * 64, one_layer)
        assert one_layer == whole[7 * 64 : 8 * 64]

    def test_an_object_is_invisible_until_its_commit(self, store: Store) -> None:
        """Also when every byte of it is written."""
        with store.open_write([key(1), key(2)], [8, 8]) as handle:
            handle.write(0, 0, bytes(8))
            handle.write(1, 0, bytes(8))
            assert there(store, 1, 2) == [False, False]
            with pytest.raises(Missing):
                store.open_read([key(1)], LEASE_S)
            handle.commit()
        assert there(store, 1, 2) == [True, True]

    @pytest.mark.parametrize("ranges", [[], [(0, 63)], [(1, 64)], [(0, 32), (33, 64)], [(0, 32), (0, 32)]])
    def test_a_commit_with_uncovered_bytes_is_refused_and_revoked(
        self, store: Store, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """A range written twice does not stand for another one. Nothing of the batch becomes visible."""
        handle = store.open_write([key(1), key(2)], [64, 64])
        handle.write(0, 0, bytes(64))
        for start, end in ranges:
            handle.write(1, start, bytes(end - start))
        with pytest.raises(Refused, match="64"):
            handle.commit()
        assert there(store, 1, 2) == [False, False]
        with pytest.raises(BadTransition):
            handle.write(1, 0, bytes(64))
        put(store, 3, size=CAPACITY)

    def test_the_first_commit_of_a_key_stays(self, store: Store) -> None:
        """Two writers of one key: both commit, and the room of the second is given back."""
        first, second = (store.open_write([key(1)], [1024]) for _ in range(2))
        first.write(0, 0, content(1, 1024))
        second.write(0, 0, content(2, 1024))
        first.commit()
        second.commit()
        assert get(store, 1) == content(1, 1024)
        put(store, 2, 3, 4)
        assert there(store, 1, 2, 3, 4) == [True] * 4

    @pytest.mark.parametrize("held", [(), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
    def test_presence_is_per_key(self, store: Store, held: Sequence[int]) -> None:
        """In the order asked."""
        for number in held:
            put(store, number)
        assert there(store, 0, 1, 2) == [number in held for number in range(3)]
        assert store.present([]) == []

    def test_presence_keeps_nothing_from_being_evicted(self, store: Store) -> None:
        """No lease and no recency comes from a lookup."""
        put(store, 0)
        put(store, 1, 2, 3)
        for _ in range(20):
            assert there(store, 0) == [True]
        put(store, 4)
        assert there(store, 0, 1, 2, 3, 4) == [False, True, True, True, True]

    # ---- room ----

    def test_a_write_without_room_is_refused_before_its_first_byte(self, store: Store) -> None:
        """And nothing is evicted for it."""
        put(store, 0, 1)
        with store.open_read([key(0)], LEASE_S), pytest.raises(Full):
            store.open_write([key(n) for n in range(10, 14)], [1024] * 4)
        assert there(store, 0, 1) == [True, True]
        put(store, 10, 11, 12, 13)

    def test_an_open_write_takes_its_room_and_a_revoke_gives_it_back(self, store: Store) -> None:
        """All of it, and once."""
        handle = store.open_write([key(1)], [CAPACITY])
        with pytest.raises(Full):
            store.open_write([key(2)], [1])
        handle.revoke()
        handle.revoke()
        put(store, 3, size=CAPACITY)
        with pytest.raises(BadTransition):
            handle.commit()
        assert there(store, 1, 3) == [False, True]

    def test_a_revoke_after_the_commit_changes_nothing(self, store: Store) -> None:
        """Leaving the `with` block is such a one."""
        with store.open_write([key(1)], [8]) as handle:
            handle.write(0, 0, content(1, 8))
            handle.commit()
            with pytest.raises(BadTransition):
                handle.commit()
        handle.revoke()
        assert get(store, 1) == content(1, 8)

    def test_the_least_recently_used_object_goes_first(self, store: Store) -> None:
        """A read is a use."""
        put(store, 0)
        put(store, 1)
        put(store, 2, 3)
        get(store, 0)
        put(store, 4)
        assert there(store, 0, 1, 2, 3, 4) == [True, False, True, True, True]

    @pytest.mark.parametrize(("numbers", "sizes"), [([1, 1], [8, 8]), ([1, 2], [8]), ([1], [0]), ([1], [-1])])
    def test_a_batch_that_makes_no_sense_is_refused(
        self, store: Store, numbers: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Before it takes room."""
        with pytest.raises(Refused):
            store.open_write([key(n) for n in numbers], sizes)
        put(store, 9, size=CAPACITY)

    @pytest.mark.parametrize(("index", "offset", "size"), [(0, -1, 1), (0, 8, 1), (0, 0, 9), (1, 0, 1), (-1, 0, 1)])
    def test_a_range_outside_the_object_is_refused(self, store: Store, index: int, offset: int, size: int) -> None:
        """For writing and for reading; the handle stays usable."""
        with store.open_write([key(1)], [8]) as handle:
            handle.write(0, 0, content(1, 8))
            with pytest.raises(Refused):
                handle.write(index, offset, bytes(size))
            handle.commit()
        with store.open_read([key(1)], LEASE_S) as read:
            with pytest.raises(Refused):
                read.read(index, offset, bytearray(size))
            assert read_all(read, 0) == content(1, 8)

    # ---- leases ----

    def test_a_read_opens_all_objects_or_none_and_names_the_absent(self, store: Store) -> None:
        """What was there is not held by the failed call."""
        put(store, 1)
        with pytest.raises(Missing, match=key(2).hex()):
            store.open_read([key(1), key(2)], LEASE_S)
        assert store.evict([key(1)]) == [True]

    def test_an_open_read_keeps_its_objects(self, store: Store, clock: FakeClock) -> None:
        """From eviction by name and by need, until its lease ends."""
        put(store, 0, 1, 2, 3)
        with store.open_read([key(0), key(1)], LEASE_S) as read:
            clock.advance(LEASE_S * 0.9)
            assert store.evict([key(0), key(2), key(9)]) == [False, True, True]
            with pytest.raises(Full):
                store.open_write([key(n) for n in range(10, 13)], [1024] * 3)
            put(store, 10, 11)
            assert read_all(read, 0) == content(0, 1024)
            assert read_all(read, 1) == content(1, 1024)
        assert store.evict([key(0)]) == [True]

    def test_an_expired_lease_holds_nothing_and_yields_no_bytes(self, store: Store, clock: FakeClock) -> None:
        """Whether the object is still there, gone, or there again."""
        put(store, 0)
        read = store.open_read([key(0)], LEASE_S)
        clock.advance(LEASE_S)
        untouched = bytearray(8)
        with pytest.raises((DeadlineExceeded, Missing)):
            read.read(0, 0, untouched)
        assert untouched == bytes(8)
        assert store.evict([key(0)]) == [True]
        with pytest.raises((DeadlineExceeded, Missing)):
            read.read(0, 0, bytearray(8))
        put(store, 0)
        with pytest.raises((DeadlineExceeded, Missing)):
            read.read(0, 0, bytearray(8))
        read.close()

    def test_closing_one_read_twice_leaves_the_other_one_its_lease(self, store: Store) -> None:
        """A lease is a token, not a count that anyone can lower."""
        put(store, 0)
        one, other = (store.open_read([key(0)], LEASE_S) for _ in range(2))
        one.close()
        one.close()
        assert store.evict([key(0)]) == [False]
        with pytest.raises(BadTransition):
            one.read(0, 0, bytearray(8))
        assert read_all(other, 0) == content(0, 1024)
        other.close()
        assert store.evict([key(0)]) == [True]

    def test_reads_that_nobody_closes_leave_nothing_after_their_leases(self, store: Store, clock: FakeClock) -> None:
        """A reader that died can't fill the store."""
        put(store, 0, 1, 2, 3)
        for _ in range(100):
            store.open_read([key(n) for n in range(4)], LEASE_S)
        clock.advance(LEASE_S)
        put(store, 4, 5, 6, 7)
        assert there(store, *range(8)) == [False] * 4 + [True] * 4

    # ---- threads, failures, the end ----

    def test_threads_that_write_the_same_keys_leave_whole_objects(self, store: Store) -> None:
        """Four writers of overlapping batches, evicting each other's: what is there is right."""

        def work(worker: int) -> None:
            for step in range(25):
                numbers = [(worker + step + at) % 6 for at in range(2)]
                try:
                    put(store, *numbers, size=512)
                    assert get(store, numbers[0]) == content(numbers[0], 512)
                except (Full, Missing):
                    continue

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        for number in range(6):
            if there(store, number) == [True]:
                assert get(store, number) == content(number, 512)
        put(store, 7, size=CAPACITY)

    def test_a_writer_that_fails_leaves_no_object_and_no_room_taken(self, store: Store) -> None:
        """The context revokes."""

        def fail() -> None:
            with store.open_write([key(1), key(2)], [8, 8]) as handle:
                handle.write(0, 0, bytes(8))
                raise PeerLost("in the middle of the batch")

        with pytest.raises(PeerLost):
            fail()
        assert there(store, 1, 2) == [False, False]
        put(store, 3, size=CAPACITY)

    def test_a_closed_store_does_nothing_more(self, store: Store) -> None:
        """Open handles end with it; closing them and it again changes nothing."""
        put(store, 1)
        read, write = store.open_read([key(1)], LEASE_S), store.open_write([key(2)], [8])
        write.write(0, 0, bytes(8))
        store.close()
        store.close()
        for call in (
            lambda: store.present([key(1)]),
            lambda: store.evict([key(1)]),
            lambda: store.open_read([key(1)], LEASE_S),
            lambda: store.open_write([key(3)], [8]),
            lambda: read.read(0, 0, bytearray(8)),
            write.commit,
        ):
            with pytest.raises(BadTransition):
                call()
        read.close()
        write.revoke()
