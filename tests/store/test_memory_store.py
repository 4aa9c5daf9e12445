import pytest

from layercast.errors import DeadlineExceeded, Missing
from layercast.store.memory import MemoryStore
from layercast.testing.faults import FakeClock
from layercast.testing.store_laws import LEASE_S, StoreLaws, get, key, put


class TestMemoryStore(StoreLaws):
    def make_store(self, capacity, clock):
        return MemoryStore(capacity, clock)


def test_one_key_a_block_whatever_the_number_of_layers():
    """80 layers of 10 blocks: 10 objects, and one batched lookup for them."""
    store = MemoryStore(1 << 20, FakeClock())
    names = [key(n) for n in range(10)]
    with store.open_write(names, [80 * 16] * 10) as handle:
        for layer in range(80):
            assert store.present(names) == [False] * 10
            for index in range(10):
                handle.write(index, layer * 16, bytes([layer]) * 16)
        handle.commit()
    assert store.leading(names) == 10
    assert get(store, 3) == b"".join(bytes([layer]) * 16 for layer in range(80))


def test_bytes_in_use_are_those_of_objects_and_open_writes():
    store = MemoryStore(4096, FakeClock())
    put(store, 1)
    handle = store.open_write([key(2)], [100])
    assert store.used == 1124
    handle.revoke()
    put(store, 1)
    assert store.used == 1024, "the second commit of a key takes no room"
    store.evict([key(1)])
    assert store.used == 0


def test_a_read_that_outlives_its_lease_is_not_trusted():
    """The lease ends between the check before the copy and the one after it."""
    clock = FakeClock()
    store = MemoryStore(4096, lambda: clock.now)
    put(store, 1)
    read = store.open_read([key(1)], LEASE_S)

    def later():
        now, clock.now = clock.now, LEASE_S
        return now

    store.clock = later
    with pytest.raises(DeadlineExceeded):
        read.read(0, 0, bytearray(8))


def test_an_object_lost_and_stored_again_during_a_lease_is_not_the_one_that_was_opened():
    store = MemoryStore(4096, FakeClock())
    put(store, 1)
    read = store.open_read([key(1)], LEASE_S)
    store._drop(key(1))
    put(store, 1)
    with pytest.raises(Missing, match="lost during its lease"):
        read.read(0, 0, bytearray(8))
