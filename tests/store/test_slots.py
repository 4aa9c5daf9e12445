import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layercast.errors import BadBlocks, Full
from layercast.store.slots import SlotTable

SLOTS = 24


def runs(slots):
    """Number of maximal runs of ascending neighbours."""
    return sum(index == 0 or slots[index - 1] + 1 != slot for index, slot in enumerate(slots))


class Allocations(RuleBasedStateMachine):
    """A table against a plain set of used slots."""

    def __init__(self):
        super().__init__()
        self.table = SlotTable(SLOTS)
        self.held = []

    def used(self):
        return [slot for slots in self.held for slot in slots]

    @rule(count=st.integers(0, SLOTS + 2), after=st.none() | st.integers(0, SLOTS))
    def allocate(self, count, after):
        free = SLOTS - len(self.used())
        if count > free:
            with pytest.raises(Full, match=f"{free} of {SLOTS}"):
                self.table.allocate(count, after)
            return
        longest = max((length for _, length in self.table.free_extents), default=0)
        slots = self.table.allocate(count, after)
        assert len(slots) == len(set(slots)) == count
        assert not set(slots) & set(self.used())
        assert list(slots) == sorted(slots)
        assert runs(slots) <= 1 or count > longest
        self.held.append(slots)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data):
        slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        kept = data.draw(st.sets(st.sampled_from(slots))) if slots else set()
        if kept:
            self.held.append(tuple(kept))
        self.table.free(data.draw(st.permutations([slot for slot in slots if slot not in kept])))

    @precondition(lambda self: self.table.free_count)
    @rule(data=st.data())
    def a_slot_can_not_be_freed_twice(self, data):
        start, length = data.draw(st.sampled_from(self.table.free_extents))
        before = self.table.free_extents
        with pytest.raises(BadBlocks, match="not in use"):
            self.table.free([*self.used(), data.draw(st.integers(start, start + length - 1))])
        assert self.table.free_extents == before

    @invariant()
    def free_and_used_are_all(self):
        free = [slot for start, length in self.table.free_extents for slot in range(start, start + length)]
        assert sorted(free + self.used()) == list(range(SLOTS))
        assert self.table.free_count == len(free)
        assert self.table.used_count == len(self.used())

    @invariant()
    def extents_that_touch_are_one(self):
        extents = self.table.free_extents
        assert all(start + length < following for (start, length), (following, _) in itertools.pairwise(extents))

    def teardown(self):
        self.table.free(self.used())
        assert self.table.free_extents == [(0, SLOTS)]


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_the_smallest_extent_that_fits_is_cut():
    """A large extent is not broken up for a request that a small one can hold."""
    table = SlotTable(20)
    table.allocate(20)
    table.free([*range(2, 5), *range(8, 16)])
    assert table.allocate(3) == (2, 3, 4)
    assert table.allocate(8) == tuple(range(8, 16))


def test_a_next_chunk_lies_behind_the_last_one_if_there_is_room():
    table = SlotTable(32)
    table.allocate(32)
    table.free([*range(4, 6), *range(10, 20)])
    assert table.allocate(2, after=10) == (10, 11)
    assert table.allocate(2, after=12) == (12, 13)
    assert table.allocate(3, after=4) == (14, 15, 16), "two are free there, but not three in a row"
    assert table.allocate(2, after=3) == (4, 5), "nothing is free there: the smallest fit"


@pytest.mark.parametrize("bad", [[-1], [8], [0, 0]])
def test_slots_that_were_never_handed_out_are_refused(bad):
    table = SlotTable(8)
    table.allocate(4)
    with pytest.raises(BadBlocks):
        table.free(bad)
    assert table.free_count == 4


def test_a_table_without_slots_is_refused():
    with pytest.raises(BadBlocks):
        SlotTable(0)


def test_long_use_leaves_requests_in_few_runs():
    """At 95 % use with requests of 8 to 64 blocks coming and going."""
    rng = random.Random(7)
    table, held, counts = SlotTable(4096), [], []
    for _ in range(4000):
        size = rng.randint(8, 64)
        while table.used_count + size > 4096 * 0.95:
            table.free(held.pop(rng.randrange(len(held))))
        slots = table.allocate(size)
        held.append(slots)
        counts.append(runs(slots))
    recent = counts[1000:]
    assert sum(recent) / len(recent) < 1.8
    assert max(recent) <= 4
