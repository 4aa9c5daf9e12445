import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layercast.control.directory import Directory, LeaseState
from layercast.control.shelf import Absence
from layercast.errors import BrokenInvariant, Full, Missing, Refused
from layercast.testing.clock import FakeClock

LEASE_S = 10.0


def key(number):
    return number.to_bytes(32, "little")


def keys(*numbers):
    return [key(number) for number in numbers]


def directory(*slots, **settings):
    clock = FakeClock()
    return Directory(slots or (4,), clock, LEASE_S, **settings), clock


def store(pool, *numbers, group=0, groups=1):
    """Save blocks in one group."""
    wanted = [keys(*numbers) if at == group else [] for at in range(groups)]
    assert pool.commit(pool.reserve("earlier", wanted).id)


# ---- visibility ----


def test_a_block_is_absent_until_it_is_committed():
    pool, _ = directory()
    reservation = pool.reserve("a", [keys(1, 2)])
    assert pool.present(0, keys(1, 2)) == [False, False]
    with pytest.raises(Missing, match="2 being saved"):
        pool.lease("b", [keys(1, 2)])
    assert pool.commit(reservation.id)
    assert pool.present(0, keys(1, 2, 3)) == [True, True, False]


def test_a_block_is_visible_once_every_rank_has_reported():
    pool, _ = directory(4, ranks=3)
    save = pool.reserve("a", [keys(1)]).id
    assert [pool.commit(save, rank) for rank in (2, 0, 0, 2)] == [False] * 4
    assert pool.present(0, keys(1)) == [False]
    assert pool.commit(save, 1)
    assert pool.present(0, keys(1)) == [True]


def test_a_save_that_one_rank_lost_is_dropped_once_all_ranks_have_ended():
    """The slot is not handed out while another rank may still write into it."""
    pool, _ = directory(1, ranks=2)
    save = pool.reserve("a", [keys(1)]).id
    pool.revoke(save, 0)
    with pytest.raises(Full):
        pool.reserve("b", [keys(2)])
    assert not pool.commit(save, 1)
    assert pool.present(0, keys(1)) == [False]
    assert pool.reserve("b", [keys(2)]).slots == ((0,),)


def test_a_report_of_a_rank_that_does_not_exist_is_refused():
    pool, _ = directory(4, ranks=2)
    save = pool.reserve("a", [keys(1)]).id
    with pytest.raises(Refused, match="rank"):
        pool.commit(save, 2)
    assert pool.absences(0, keys(1)) == [Absence.SAVING]


def test_a_key_says_why_it_is_absent():
    pool, _ = directory(2)
    store(pool, 1, 2)
    store(pool, 3)
    saving = pool.reserve("a", [keys(4)])
    assert pool.absences(0, keys(1, 2, 3, 4, 5)) == [
        Absence.EVICTED,
        Absence.EVICTED,
        None,
        Absence.SAVING,
        Absence.NEVER,
    ]
    pool.revoke(saving.id)
    pool.forget(0, keys(3))
    assert pool.absences(0, keys(3, 4)) == [Absence.CORRUPT, Absence.NEVER]
    store(pool, 3)
    assert pool.absences(0, keys(3)) == [None]


def test_the_memory_of_evicted_keys_is_bounded():
    pool, _ = directory(1, remember=2)
    for number in range(5):
        store(pool, number)
    assert pool.absences(0, keys(0, 1, 2, 3, 4)) == [Absence.NEVER] * 2 + [Absence.EVICTED] * 2 + [None]


def test_looking_up_has_no_side_effects():
    """A thousand lookups neither pin a block nor save it from eviction."""
    pool, _ = directory(2)
    store(pool, 1)
    store(pool, 2)
    before = pool.stats
    for _ in range(1000):
        assert pool.present(0, keys(1)) == [True]
        assert pool.absences(0, keys(1)) == [None]
    assert pool.stats == before
    assert pool.idle
    store(pool, 3)
    assert pool.present(0, keys(1, 2)) == [False, True]


# ---- room ----


def test_a_save_without_room_is_refused_before_its_first_layer():
    """Over all groups: the group that has room loses nothing either."""
    pool, _ = directory(4, 2)
    store(pool, 1, 2, 3, 4, groups=2)
    store(pool, 1, 2, group=1, groups=2)
    lease = pool.lease("reader", [[], keys(1)])
    with pytest.raises(Full, match=r"2 blocks to save in group 1, room for 1 of 2.*host_bytes"):
        pool.reserve("a", [keys(5, 6), keys(5, 6)])
    assert all(pool.present(0, keys(1, 2, 3, 4)) + pool.present(1, keys(1, 2)))
    assert pool.stats.saves_dropped == 1
    assert pool.room() == (4, 1)
    pool.release(lease)
    pool.check()


def test_a_prompt_longer_than_the_pool_is_refused_and_its_stored_part_stays():
    pool, _ = directory(4)
    store(pool, 1, 2)
    with pytest.raises(Full, match="save fewer"):
        pool.reserve("a", [keys(1, 2, 3, 4, 5, 6)])
    assert pool.present(0, keys(1, 2)) == [True, True]


def test_a_save_never_evicts_its_own_prefix():
    pool, _ = directory(4)
    store(pool, 1, 2)
    store(pool, 8, 9)
    reservation = pool.reserve("a", [keys(1, 2, 3, 4)])
    assert reservation.indices == ((2, 3),)
    assert pool.present(0, keys(1, 2, 8, 9)) == [True, True, False, False]


def test_a_save_into_gaps_of_its_prefix_evicts_nothing_between_them():
    pool, _ = directory(4)
    store(pool, 1, 2, 3, 4)
    pool.forget(0, keys(2, 4))
    store(pool, 8, 9)
    assert pool.reserve("a", [keys(1, 2, 3, 4)]).indices == ((1, 3),)
    assert pool.present(0, keys(1, 3, 8, 9)) == [True, True, False, False]
    pool.check()


def test_the_least_recently_used_block_goes_first_and_a_tail_before_its_head():
    pool, _ = directory(6)
    store(pool, 1, 2, 3)
    store(pool, 4, 5, 6)
    pool.release(pool.lease("reader", [keys(1, 2, 3)]))
    gone = []
    for number in range(10, 16):
        store(pool, number)
        gone += [n for n in range(1, 7) if n not in gone and not pool.present(0, keys(n))[0]]
    assert gone == [6, 5, 4, 3, 2, 1]


def test_a_prefix_saved_in_chunks_ages_as_one():
    """Given the whole prefix with each chunk, the last block of the last chunk goes first."""
    pool, _ = directory(6)
    for end in (2, 4, 6):
        assert pool.commit(pool.reserve("a", [keys(*range(end))]).id)
    store(pool, 10, 11, 12)
    assert pool.present(0, keys(*range(6))) == [True] * 3 + [False] * 3


def test_a_prefix_of_several_prompts_is_as_young_as_the_youngest_use_of_any():
    """What only the older of two prompts has goes first; then the other's tail, and what they share last."""
    pool, _ = directory(6)
    for prompt in ((1, 2, 3, 4), (1, 2, 5), (1, 2, 5, 6)):
        assert pool.commit(pool.reserve("a", [keys(*prompt)]).id)
    gone = []
    for number in range(10, 16):
        store(pool, number)
        gone += [n for n in range(1, 7) if n not in gone and not pool.present(0, keys(n))[0]]
        pool.check()
    assert gone == [4, 3, 6, 5, 2, 1]


def test_a_shorter_prompt_renews_no_more_than_it_has():
    pool, _ = directory(6)
    store(pool, 1, 2, 3, 4)
    store(pool, 8, 9)
    pool.release(pool.lease("reader", [keys(1, 2)]))
    store(pool, 10, 11, 12)
    assert pool.present(0, keys(1, 2, 3, 4, 8, 9)) == [True, True, False, False, True, False]


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_block_that_is_saved_anew_in_the_midst_of_a_prefix_ages_with_it(bad):
    pool, _ = directory(6)
    store(pool, 1, 2, 3)
    pool.forget(0, keys(bad))
    store(pool, 1, 2, 3)
    store(pool, 7, 8, 9)
    pool.release(pool.lease("reader", [keys(1, 2, 3)]))
    store(pool, 10, 11)
    assert pool.present(0, keys(1, 2, 3, 7, 8, 9)) == [True, True, True, True, False, False]
    pool.check()


@pytest.mark.parametrize("reader", [(1, 2, 3), (1, 2, 4)])
def test_what_prompts_share_ages_with_each_of_them_when_it_is_saved_anew_as_a_whole(reader):
    pool, _ = directory(6)
    store(pool, 1, 2, 3)
    store(pool, 1, 2, 4)
    pool.forget(0, keys(1, 2))
    store(pool, 1, 2, 3)
    store(pool, 7, 8)
    pool.release(pool.lease("reader", [keys(*reader)]))
    store(pool, 10, 11, 12)
    assert pool.present(0, keys(*reader)) == [True] * 3
    pool.check()


def test_a_request_that_goes_on_keeps_its_prefix_in_a_full_pool():
    """Whoever has saved that, and whatever was saved in between."""
    pool, _ = directory(8)
    store(pool, 1, 2, 3)
    for more in range(4, 8):
        store(pool, 10 * more)
        assert pool.commit(pool.reserve("reader", [keys(*range(1, more + 1))]).id)
    assert pool.present(0, keys(*range(1, 8), 40, 50, 60, 70)) == [True] * 7 + [False] * 3 + [True]


def test_chunks_of_a_prefix_lie_in_one_run_of_slots():
    pool, _ = directory(32)
    store(pool, *range(100, 132))
    pool.forget(0, keys(*range(102, 105), *range(110, 130)))
    slots = []
    for end in (4, 7, 12):
        slots += pool.reserve("a", [keys(*range(end))]).slots[0]
    assert slots == list(range(slots[0], slots[0] + 12))


def test_blocks_that_others_save_or_have_saved_are_skipped():
    """Requests with overlapping prefixes in one step: each block is saved once."""
    pool, _ = directory(8)
    first = pool.reserve("a", [keys(1, 2, 3)])
    second = pool.reserve("b", [keys(1, 2, 4)])
    third = pool.reserve("c", [keys(1, 2)])
    assert [r.indices for r in (first, second, third)] == [((0, 1, 2),), ((2,),), ((),)]
    assert third.blocks == 0
    assert not set(first.slots[0]) & set(second.slots[0])
    pool.commit(first.id)
    pool.commit(second.id)
    assert pool.idle
    assert pool.present(0, keys(1, 2, 3, 4)) == [True] * 4


def test_a_repeated_key_is_saved_once():
    pool, _ = directory(4)
    assert pool.reserve("a", [keys(1, 1, 2, 1)]).indices == ((0, 2),)


def test_keys_for_another_number_of_groups_are_refused():
    pool, _ = directory(4, 4)
    with pytest.raises(Refused, match="2"):
        pool.reserve("a", [keys(1)])
    with pytest.raises(Refused, match="2"):
        pool.lease("a", [keys(1)])


@pytest.mark.parametrize("bad", [{"ranks": 0}, {"lease_s": 0.0}])
def test_settings_that_can_not_work_are_refused(bad):
    with pytest.raises(Refused):
        Directory((4,), FakeClock(), **{"lease_s": LEASE_S, **bad})


# ---- leases ----


def test_leased_blocks_stay_where_they_are():
    pool, _ = directory(2)
    store(pool, 1, 2)
    lease = pool.lease("reader", [keys(2, 1)])
    assert lease.slots == ((1, 0),)
    with pytest.raises(Full, match="room for 0 of 2"):
        pool.reserve("a", [keys(3)])
    pool.release(lease)
    assert pool.reserve("a", [keys(3)]).blocks == 1


def test_a_lease_takes_all_its_blocks_or_none_and_names_what_is_missing():
    pool, _ = directory(2)
    store(pool, 1)
    with pytest.raises(Missing, match=r"2 of 3 blocks.*2 never stored.*recompute"):
        pool.lease("reader", [keys(1, 2, 3)])
    assert pool.idle
    assert pool.stats.misses[Absence.NEVER] == 1 + 2
    store(pool, 8, 9)
    assert pool.present(0, keys(1)) == [False], "it was not pinned"


def test_two_leases_on_one_block_end_one_by_one():
    pool, _ = directory(1)
    store(pool, 1)
    one, two = (pool.lease(name, [keys(1)]) for name in "ab")
    pool.release(one)
    assert pool.room() == (0,)
    pool.release(two)
    assert pool.room() == (1,)


def test_a_second_release_is_counted_and_changes_nothing():
    pool, _ = directory(2)
    store(pool, 1)
    first, other = (pool.lease(name, [keys(1)]) for name in "ab")
    pool.release(first)
    pool.release(first)
    assert pool.stats.double_releases == 1
    assert pool.room() == (1,), "the other lease still holds"
    pool.release(other)
    pool.check()


def test_a_lease_ends_at_its_deadline_and_its_release_is_not_a_double_one():
    pool, clock = directory(1)
    store(pool, 1)
    lease = pool.lease("reader", [keys(1)])
    clock.advance(LEASE_S - 0.001)
    assert pool.expire(clock()) == 0
    with pytest.raises(Full):
        pool.reserve("a", [keys(2)])
    clock.advance(0.001)
    assert pool.reserve("a", [keys(2)]).slots == ((0,),)
    assert lease.state is LeaseState.EXPIRED
    with pytest.raises(Missing, match="expired"):
        pool.renew(lease)
    pool.release(lease)
    assert (pool.stats.double_releases, pool.stats.leases_expired) == (0, 1)
    pool.check()


def test_a_renewed_lease_lives_its_full_time_again():
    pool, clock = directory(2)
    store(pool, 1)
    renewed, other = (pool.lease(name, [keys(1)]) for name in "ab")
    clock.advance(LEASE_S / 2)
    pool.renew(renewed)
    clock.advance(LEASE_S / 2)
    assert pool.expire(clock()) == 1
    assert (renewed.state, other.state) == (LeaseState.HELD, LeaseState.EXPIRED)
    clock.advance(LEASE_S / 2)
    assert pool.expire(clock()) == 1
    assert pool.idle


def test_a_thousand_leases_that_nobody_releases_leave_nothing():
    pool, clock = directory(4)
    store(pool, 1, 2)
    for number in range(1000):
        pool.lease(f"r{number}", [keys(1, 2)])
        clock.advance(0.1)
    clock.advance(LEASE_S)
    pool.expire(clock())
    assert pool.idle
    assert pool.room() == (4,)
    pool.check()


# ---- ends that come late or badly ----


def test_a_reservation_outlives_any_deadline_since_its_copy_may_still_write():
    pool, clock = directory(1)
    save = pool.reserve("a", [keys(1)])
    clock.advance(1000 * LEASE_S)
    with pytest.raises(Full):
        pool.reserve("b", [keys(2)])
    assert pool.commit(save.id)
    pool.check()


def test_slots_ascend_with_the_engine_blocks_that_hold_the_bytes():
    pool, _ = directory(8)
    save = pool.reserve("a", [keys(0, 1, 2, 3, 4)], [([1, 2, 3, 4], [9, 8, 7, 11])])
    assert save.indices == ((3, 2, 1, 4),)
    assert save.slots == ((0, 1, 2, 3),)
    assert pool.commit(save.id)
    assert pool.present(0, keys(0, 1, 2, 3, 4)) == [False, True, True, True, True]


def test_a_late_report_about_a_save_that_has_ended_changes_nothing():
    """Also when its key and its slot are in use again by another save."""
    pool, _ = directory(1)
    old = pool.reserve("a", [keys(1)])
    pool.revoke(old.id)
    new = pool.reserve("b", [keys(1)])
    assert new.slots == old.slots
    assert not pool.commit(old.id)
    pool.revoke(old.id)
    assert pool.absences(0, keys(1)) == [Absence.SAVING]
    assert pool.stats.late_reports == 2
    assert pool.stats.saves_failed == 1
    assert pool.commit(new.id)
    pool.revoke(new.id)
    assert pool.present(0, keys(1)) == [True]


def test_a_corrupt_block_is_gone_at_once_when_nobody_reads_it():
    pool, _ = directory(1)
    store(pool, 1)
    assert pool.forget(0, keys(1, 2)) == 1
    assert pool.present(0, keys(1)) == [False]
    assert pool.room() == (1,)


def test_a_corrupt_block_that_is_leased_keeps_its_slot_but_gets_no_new_lease():
    """It can be saved anew meanwhile, into another slot."""
    pool, _ = directory(2)
    store(pool, 1)
    lease = pool.lease("reader", [keys(1)])
    pool.forget(0, keys(1))
    with pytest.raises(Missing, match="1 corrupt"):
        pool.lease("other", [keys(1)])
    pool.check()
    again = pool.reserve("a", [keys(1)])
    assert again.slots != lease.slots
    pool.commit(again.id)
    pool.release(lease)
    pool.check()
    assert pool.present(0, keys(1)) == [True]
    assert pool.room() == (2,)


def test_forgetting_a_key_that_is_being_saved_leaves_the_save_alone():
    pool, _ = directory(2)
    save = pool.reserve("a", [keys(1)]).id
    assert pool.forget(0, keys(1)) == 0
    assert pool.commit(save)


def test_a_lost_slot_is_found_by_the_check():
    pool, _ = directory(2)
    store(pool, 1)
    pool._shelves[0].table.allocate(1)
    with pytest.raises(BrokenInvariant, match="free and used"):
        pool.check()


def test_the_counts_say_what_happened():
    pool, _ = directory(2)
    store(pool, 1, 2)
    pool.release(pool.lease("reader", [keys(1, 2)]))
    store(pool, 3)
    stats = pool.stats
    assert (stats.hits, stats.saved, stats.evictions) == (2, 3, 1)
    assert stats.misses == {Absence.NEVER: 3}


# ---- any sequence ----

SLOTS = (5, 3)
RANKS = 2


def chain(letters):
    """Keys that name all before them, as real ones do."""
    return [bytes(letters[:end]).ljust(32, b"\xff") for end in range(1, len(letters) + 1)]


some_keys = st.lists(st.integers(0, 1), max_size=4).map(chain)
EVERY = sorted({key for letters in itertools.product((0, 1), repeat=4) for key in chain(letters)})


class AnySequence(RuleBasedStateMachine):
    """The directory against what a worker would see: which key's bytes each slot holds, and who relies on them."""

    def __init__(self):
        super().__init__()
        self.pool, self.clock = directory(*SLOTS, ranks=RANKS)
        self.bytes_of = [{} for _ in SLOTS]
        self.leases = []
        self.saves = []
        self.ended_saves = []
        self.unnamed = {}

    def stored(self, group):
        return {k for k in EVERY if self.pool.present(group, [k])[0]}

    def held_slots(self, group):
        return {slot for lease, _ in self.live_leases() for slot in lease.slots[group]}

    def saving_slots(self, group):
        return {slot for save, *_ in self.live_saves() for slot in save.slots[group]}

    def live_leases(self):
        return [pair for pair in self.leases if pair[0].state is LeaseState.HELD]

    def live_saves(self):
        return self.saves

    @rule(first=some_keys, second=some_keys, at_once=st.booleans())
    def reserve(self, first, second, at_once):
        self.pool.expire(self.clock())
        wanted = (first, second)
        before = [self.stored(group) for group in range(2)]
        being_saved = [self.saving_keys(group) for group in range(2)]
        new = [list(dict.fromkeys(k for k in wanted[g] if k not in before[g] | being_saved[g])) for g in range(2)]
        busy = [len(self.held_slots(g) | self.saving_slots(g)) for g in range(2)]
        own = [{k for k in wanted[g] if k in before[g] and k not in self.leased_and_stored(g)} for g in range(2)]
        fits = all(len(new[g]) <= SLOTS[g] - busy[g] - len(own[g]) for g in range(2))
        try:
            save = self.pool.reserve("r", wanted)
        except Full:
            assert not fits
            assert [self.stored(group) for group in range(2)] == before
            return
        assert fits
        for group in range(2):
            assert [wanted[group][i] for i in save.indices[group]] == new[group]
            slots = set(save.slots[group])
            assert len(slots) == len(new[group])
            assert not slots & self.held_slots(group), "a leased slot was handed out"
            assert not slots & self.saving_slots(group), "a slot was handed out twice"
            assert before[group] & set(wanted[group]) <= self.stored(group), "its own prefix was evicted"
            for slot in slots:
                self.bytes_of[group][slot] = None
        if save.blocks:
            self.saves.append((save, new, ended := set()))
            if at_once:
                ended |= {(rank, True) for rank in range(RANKS)}
                reports = [self.pool.commit(save.id, rank) for rank in range(RANKS)]
                assert reports == [False] * (RANKS - 1) + [True]
                self.settle(save, new, ended, True, True)

    def saving_keys(self, group):
        return {k for _, names, _ in self.live_saves() for k in names[group] if k is not None}

    @rule(first=some_keys, second=some_keys, known=st.integers(0, 3))
    def reserve_what_has_no_names_yet(self, first, second, known):
        wanted = (first, second)
        lists = [names[:known] for names in wanted]
        before = [self.stored(group) for group in range(2)]
        try:
            save = self.pool.reserve("r", lists, [(range(len(names)), ()) for names in wanted])
        except Full:
            assert [self.stored(group) for group in range(2)] == before
            return
        for group in range(2):
            slots = set(save.slots[group])
            assert not slots & (self.held_slots(group) | self.saving_slots(group))
            assert before[group] & set(lists[group]) <= self.stored(group), "its own prefix was evicted"
            self.bytes_of[group].update(dict.fromkeys(slots))
        if save.blocks:
            names = [[None] * len(slots) for slots in save.slots]
            self.saves.append((save, names, set()))
            self.unnamed[save.id] = (wanted, lists)
            if not any(len(names) > known for names in wanted):
                self.named(save, names, before)

    @precondition(lambda self: self.unnamed)
    @rule(data=st.data())
    def name(self, data):
        name = data.draw(st.sampled_from(sorted(self.unnamed)))
        wanted, lists = self.unnamed[name]
        before = [self.stored(group) | self.saving_keys(group) for group in range(2)]
        for named, every in zip(lists, wanted, strict=True):
            named[:] = every
        self.pool.name(name)
        for save, names, _ in self.live_saves():
            if save.id == name:
                self.named(save, names, before)
        self.unnamed.pop(name, None)

    def named(self, save, names, known):
        """What is known by then gets no second name."""
        wanted, _ = self.unnamed.pop(save.id)
        for group in range(2):
            names[group][:] = [
                None if (k := wanted[group][index]) in known[group] else k for index in save.indices[group]
            ]
            assert sorted(save.keys[group]) == sorted(k for k in names[group] if k is not None)

    def leased_and_stored(self, group):
        """Keys whose present block is leased (not an older, dropped one of the same key)."""
        return {
            k
            for lease, names in self.live_leases()
            for k, slot in zip(names[group], lease.slots[group], strict=True)
            if k in self.stored(group) and self.slot_of(group, k) == slot
        }

    def slot_of(self, group, wanted):
        return self.pool._shelves[group].stored[wanted]

    @precondition(lambda self: self.saves)
    @rule(data=st.data(), rank=st.integers(0, RANKS - 1))
    def commit(self, data, rank):
        save, names, ended = data.draw(st.sampled_from(self.saves))
        live = (save, names, ended) in self.live_saves()
        if live:
            ended.add((rank, True))
        visible = self.pool.commit(save.id, rank)
        self.settle(save, names, ended, live, visible)

    @precondition(lambda self: self.saves)
    @rule(data=st.data(), rank=st.none() | st.integers(0, RANKS - 1))
    def revoke(self, data, rank):
        save, names, ended = data.draw(st.sampled_from(self.saves))
        live = (save, names, ended) in self.live_saves()
        ended |= {(r, False) for r in (range(RANKS) if rank is None else [rank])}
        self.pool.revoke(save.id, rank)
        self.settle(save, names, ended, live, False)

    def settle(self, save, names, ended, live, visible):
        over = live and {rank for rank, _ in ended} == set(range(RANKS))
        assert visible == (over and all(saved for _, saved in ended))
        if visible:
            for group in range(2):
                self.bytes_of[group].update(zip(save.slots[group], names[group], strict=True))
                assert set(names[group]) - {None} <= self.stored(group)
        if over or not live:
            self.saves = [other for other in self.saves if other[0] is not save]
            self.ended_saves.append(save.id)

    @precondition(lambda self: self.ended_saves)
    @rule(data=st.data(), rank=st.integers(0, RANKS - 1), committed=st.booleans())
    def a_late_report_changes_nothing(self, data, rank, committed):
        save = data.draw(st.sampled_from(self.ended_saves))
        before = [self.pool.absences(group, EVERY) for group in range(2)]
        if committed:
            assert not self.pool.commit(save, rank)
        else:
            self.pool.revoke(save, rank)
        assert [self.pool.absences(group, EVERY) for group in range(2)] == before

    @rule(data=st.data(), absent=st.booleans())
    def lease(self, data, absent):
        stored = [sorted(self.stored(group)) for group in range(2)]
        wanted = [data.draw(st.lists(st.sampled_from(names), max_size=4)) if names else [] for names in stored]
        wanted[0] += data.draw(some_keys) if absent else []
        there = all(set(wanted[group]) <= self.stored(group) for group in range(2))
        try:
            lease = self.pool.lease("r", wanted)
        except Missing:
            assert not there
            return
        assert there
        self.leases.append((lease, wanted))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data, again):
        lease, _ = data.draw(st.sampled_from(self.leases))
        self.pool.release(lease)
        if again:
            self.pool.release(lease)

    @precondition(lambda self: self.live_leases())
    @rule(data=st.data())
    def renew(self, data):
        lease, _ = data.draw(st.sampled_from(self.live_leases()))
        if lease.deadline > self.clock():
            self.pool.renew(lease)
            assert lease.deadline == self.clock() + LEASE_S

    @rule(group=st.integers(0, 1), bad=st.sampled_from(EVERY).map(lambda one: [one]))
    def forget(self, group, bad):
        self.pool.forget(group, bad)
        assert not self.stored(group) & set(bad)

    @rule(seconds=st.sampled_from([1.0, 4.0, LEASE_S]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)
        self.pool.expire(self.clock())
        assert all(lease.deadline > self.clock() for lease, _ in self.live_leases())

    @invariant()
    def every_lease_sees_the_bytes_it_was_promised(self):
        for lease, names in self.live_leases():
            for group in range(2):
                assert [self.bytes_of[group][slot] for slot in lease.slots[group]] == list(names[group])

    @invariant()
    def every_slot_is_accounted_for(self):
        self.pool.check()

    def teardown(self):
        """No leak: with every lease and save ended, every slot can be had again."""
        self.clock.advance(LEASE_S)
        self.pool.expire(self.clock())
        for save, *_ in self.saves:
            self.pool.revoke(save.id)
        self.pool.check()
        assert self.pool.idle
        assert self.pool.room() == SLOTS
        for group, slots in enumerate(SLOTS):
            wanted = [keys(*range(100, 100 + slots)) if at == group else [] for at in range(2)]
            assert Counter(self.pool.reserve("last", wanted).slots[group]) == Counter(range(slots))


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_of_a_prompt_of_more_blocks_than_fates_are_kept_of_the_first_is_known_to_have_had_no_room():
    """Whoever asks for the prompt again asks for its first block."""
    pool, _ = directory(2, remember=3)
    with pytest.raises(Full):
        pool.reserve("long", [keys(1, 2, 3, 4, 5)])
    assert pool.absences(0, keys(1, 2, 3, 4)) == [Absence.NO_ROOM] * 3 + [Absence.NEVER]
