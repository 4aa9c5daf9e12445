"""The scheduler side alone: many ranks report, tokens held by the engine are not loaded, and doubt spreads."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from layercast.config import Config
from layercast.control.node import scheduler_side
from layercast.control.rates import LARGE
from layercast.control.scheduler import AT_ONCE, WorkerFacts
from layercast.control.shelf import AHEAD_SHARE
from layercast.errors import BadBlocks, LayoutMismatch
from layercast.flow.orders import LoadEnd, LoadOutcome, SaveOutcome, StepReport
from layercast.observe.receipts import MissReason
from layercast.plan.policy import Company, Mode
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.spec.identities import identities_of
from layercast.spec.keys import Extra, ExtraKind
from layercast.testing.oracle import ByteEngine

BLOCK, LAYERS = 4, 3
SPECS = (GroupSpec("full", GroupKind.FULL, BLOCK, tuple(range(LAYERS))),)
IDENTITIES = identities_of(ByteEngine(SPECS, 2).layout, model="m")
TOKENS = list(range(100, 100 + 8 * BLOCK + 1))
TABLE = list(range(1, 9))


def side_of(*slots, shared_blocks=False, threshold=0, lease_s=60.0):
    facts = [WorkerFacts(SPECS, IDENTITIES, (count,)) for count in slots]
    config = Config(kv_recompute_threshold=threshold, host_bytes=1, lease_s=lease_s)
    return scheduler_side(facts, config, shared_blocks)


def saved(order, good=True):
    return StepReport(0, (), (), (SaveOutcome(order.id, order.request, good, 1, LAYERS, 0),))


def loaded(order, end=LoadEnd.LANDED, bad=(), verified=True):
    failed = () if end is LoadEnd.LANDED else (order.request,)
    outcome = LoadOutcome(order.id, order.request, end, 1, LAYERS, verified, 0.0, 0.0, "", tuple(bad))
    return StepReport(0, failed, (outcome,))


def store(side, request="cold"):
    order = side.save_order(request, TOKENS, 0, len(TOKENS), [TABLE])
    for rank in range(side.directory.ranks):
        side.settle(saved(order), rank)
    side.finish(request)


def test_a_save_is_visible_only_once_every_rank_has_reported_it():
    side = side_of(16, 16, 16)
    order = side.save_order("cold", TOKENS, 0, len(TOKENS), [TABLE])
    for rank in (2, 0, 1):
        assert side.match(TOKENS).tokens == 0
        side.settle(saved(order), rank)
    assert side.match(TOKENS).tokens == 8 * BLOCK
    assert side.idle


def test_only_what_is_being_saved_is_said_to_be_coming():
    """Not the block that is left out for a draft; or a request would wait for as long as anything is being saved."""
    side = side_of(32)
    store(side)
    other = side.save_order("other", [9, *TOKENS], 0, 4 * BLOCK, [TABLE])
    match = side.match(TOKENS, spare_last=True)
    assert (match.tokens, match.coming) == (7 * BLOCK, 0)
    ours = side.match([9, *TOKENS], spare_last=True)
    assert (ours.tokens, ours.coming) == (0, 3 * BLOCK)
    side.settle(saved(other))
    assert side.match([9, *TOKENS], spare_last=True).tokens == 3 * BLOCK


SEVERAL = (*SPECS, GroupSpec("window", GroupKind.WINDOW, 2 * BLOCK, (LAYERS,), 2 * BLOCK))
ends = st.sampled_from([TOKENS, [9, *TOKENS], [*TOKENS[: 3 * BLOCK], 9, *TOKENS[3 * BLOCK :]]])
part = st.tuples(ends, st.integers(0, 8), st.integers(0, 8), st.booleans(), st.booleans())


@given(st.lists(part, max_size=6), ends, st.sampled_from([0, BLOCK, 3 * BLOCK, 8 * BLOCK]))
@example([(TOKENS, 0, 0, True, False), (TOKENS, 0, 8, True, True), (TOKENS, 0, 8, False, False)], TOKENS, 0)
def test_a_look_at_what_is_coming_is_left_out_only_where_it_would_find_no_more(parts, asked, local):
    """Whatever was saved in part, lost from one group, or is being saved: in either group, and by whomever."""
    names = identities_of(ByteEngine(SEVERAL, 2).layout, model="m")
    config = Config(kv_recompute_threshold=0, host_bytes=1)
    side = scheduler_side([WorkerFacts(SEVERAL, names, (64, 64))], config, False)
    for nth, (tokens, before, after, done, lost) in enumerate(parts):
        tables = [list(range(1, 9)), list(range(1, 5))]
        order = side.save_order(str(nth), tokens, BLOCK * before, BLOCK * after, tables)
        if order is not None and done:
            side.settle(saved(order))
        if lost:
            side.directory.forget(nth % 2, side.match(tokens).keys[nth % 2][-1:])
    answered = side.match(asked, local_tokens=local)
    side._coming = lambda *_: True
    assert answered.coming == side.match(asked, local_tokens=local).coming


@pytest.mark.parametrize("quiet", [True, False])
def test_what_is_rather_computed_is_not_said_to_be_coming(quiet):
    side = side_of(32, threshold=6 * BLOCK)
    store(side)
    other = None if quiet else side.save_order("other", [9, *TOKENS], 0, 5 * BLOCK, [TABLE])
    match = side.match(TOKENS[: 5 * BLOCK + 1])
    assert (match.tokens, match.miss, match.coming) == (0, MissReason.BELOW_THRESHOLD, 0)
    assert side.match([9, *TOKENS]).coming == 0
    if other is not None:
        more = side.save_order("more", [9, *TOKENS], 5 * BLOCK, 8 * BLOCK, [TABLE])
        assert side.match([9, *TOKENS]).coming == 8 * BLOCK
        for save in (other, more):
            side.settle(saved(save))
        assert side.match([9, *TOKENS]).tokens == 8 * BLOCK


ASKED = [(TOKENS, 0), (TOKENS, 2 * BLOCK), ([9, *TOKENS], 0), (TOKENS[: 3 * BLOCK + 1], 0)]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "save", "settle", "lose", "renew", "load", "compute"]), st.integers(0, 7))
    )
)
def test_who_asks_again_is_answered_as_if_for_the_first_time(steps):
    side, last, under_way = side_of(10), {}, []
    for step, number in steps:
        tokens, local = ASKED[number % len(ASKED)]
        if step == "save":
            order = side.save_order("cold", [*ASKED, ([0, *TOKENS], 0)][number % 5][0], 0, len(TOKENS), [TABLE])
            under_way += [] if order is None else [order]
        elif step == "settle" and under_way:
            side.settle(saved(under_way.pop(), good=number > 0))
        elif step == "lose":
            side.directory.forget(0, side.match(tokens).keys[0][:1])
        elif step == "load" and (order := side.load_order("hit", side.match(tokens), [TABLE])) is not None:
            side.settle(loaded(order))
        elif step == "renew":
            side.renew()
        elif step == "compute":
            side.chooser.rates.computed(LARGE + number, 0.1)
        for nth, (tokens, local) in enumerate(ASKED):
            company = Company(number % 2, 0, 0)
            again = side.match(tokens, None, local, company=company, last=last.get(nth))
            fresh = side.match(tokens, None, local, company=company)
            assert [*map(list, again.keys)] == [*map(list, fresh.keys)]
            assert replace(again, keys=()) == replace(fresh, keys=())
            last[nth] = again


def test_who_asks_again_hears_that_there_was_no_room_meanwhile():
    side = side_of(2)
    first = side.match(TOKENS)
    assert first.miss is MissReason.NEVER_STORED
    assert side.save_order("long", TOKENS, 0, len(TOKENS), [TABLE]) is None
    assert side.match(TOKENS, last=first).miss is MissReason.NO_ROOM


def test_who_asks_again_while_nothing_has_changed_gets_the_very_same_answer():
    side = side_of(32)
    store(side)
    first = side.match(TOKENS, request="hit")
    assert side.match(TOKENS, request="hit", last=first) is first
    assert side.match(TOKENS, request="hit", last=first, company=Company(1, 0, 0)) is not first


def test_who_asks_again_is_decided_on_by_what_is_known_of_costs_by_then():
    side, company = side_of(32), Company(running=2)
    store(side)
    side.chooser.rates.loaded(1 << 30, 1.0)
    before = side.match(TOKENS, company=company)
    assert before.decision.mode is Mode.BACKGROUND, "others run, and what a token costs is not known"
    side.chooser.rates.computed(LARGE, 0.1)
    assert side.match(TOKENS, company=company, last=before).decision.mode is Mode.LAYERWISE


LONG = list(range(BLOCK * (AT_ONCE + 2)))
"""Tokens of more blocks than are named with the order that saves them."""


def saving(side, request, tokens=LONG):
    blocks = len(tokens) // BLOCK
    return side.save_order(request, tokens, 0, len(tokens), [list(range(1, blocks + 1))])


def test_many_blocks_get_their_names_behind_the_order_and_are_found_as_ever():
    side = side_of(100)
    first = saving(side, "first")
    assert len(side.directory._shelves[0].unnamed) == AT_ONCE + 2
    assert side.match([*LONG, 0]).coming == len(LONG), "whoever asks is told by name"
    assert saving(side, "second") is None, "they are saved once"
    side.settle(saved(first))
    assert side.match([*LONG, 0]).tokens == len(LONG)
    assert side.idle
    side.directory.check()


def test_who_asks_for_another_prompt_waits_for_no_names():
    side = side_of(200)
    orders = [saving(side, "first"), saving(side, "second", [9, *LONG[1:]])]
    assert side.match([8, *LONG[1:]]).miss is MissReason.NEVER_STORED
    assert len(side.directory._shelves[0].unnamed) == 2 * (AT_ONCE + 2)
    assert saving(side, "again") is None
    assert len(side.directory._shelves[0].unnamed) == AT_ONCE + 2
    for order in orders:
        side.settle(saved(order))
    assert [side.match([first, *LONG[1:], 0]).tokens for first in (0, 9)] == [len(LONG)] * 2
    side.directory.check()


def test_many_blocks_that_the_pool_has_for_a_part_are_saved_for_the_rest():
    side = side_of(100)
    part = LONG[: AT_ONCE // 2 * BLOCK]
    side.settle(saved(saving(side, "part", part)))
    (pairs,) = (order := saving(side, "all")).pairs
    assert len(pairs.slots) == AT_ONCE + 2 - AT_ONCE // 2
    assert pairs.blocks == tuple(range(AT_ONCE // 2 + 1, AT_ONCE + 3))
    side.settle(saved(order))
    assert side.match([*LONG, 0]).tokens == len(LONG)
    assert side.directory.room() == (100,)
    side.directory.check()


def test_a_block_that_the_pool_has_behind_one_it_has_not_is_saved_once_all_the_same():
    """Nobody has looked for it; its second slot is free when the save has ended."""
    side = side_of(100)
    side.settle(saved(saving(side, "all")))
    side.directory.forget(0, side.match([*LONG, 0]).keys[:1][0][:1])
    side.directory.record()
    order = saving(side, "again")
    assert len(order.pairs[0].slots) == AT_ONCE + 2
    side.settle(saved(order))
    assert side.match([*LONG, 0]).tokens == len(LONG)
    assert [len(change.keys) for change in side.directory.changes.take()] == [1]
    assert side.directory._shelves[0].table.used_count == AT_ONCE + 2
    side.directory.check()


def test_blocks_that_turn_out_to_have_no_name_are_not_kept():
    side = side_of(100)
    unnamed = {AT_ONCE: [Extra(ExtraKind.ADAPTER, b"")]}
    order = side.save_order("r", LONG, 0, len(LONG), [list(range(1, AT_ONCE + 3))], unnamed)
    side.settle(saved(order))
    assert side.match([*LONG, 0]).tokens == BLOCK, "its name was asked for before"
    assert side.directory._shelves[0].table.used_count == 1
    assert side.idle
    side.directory.check()


@pytest.mark.parametrize("renewed", [False, True])
def test_a_save_that_fails_before_its_blocks_have_names_leaves_nothing(renewed):
    side = side_of(100)
    order = saving(side, "r")
    if renewed:
        side.renew()
    side.settle(saved(order, good=renewed))
    assert side.match([*LONG, 0]).coming == 0
    assert side.directory._shelves[0].table.used_count == 0
    assert side.idle
    side.directory.check()


def test_where_the_pool_is_full_room_for_the_next_long_prompt_is_made_behind_the_order():
    """A small part of it; what was used last stays."""
    slots = AHEAD_SHARE * 4 * (AT_ONCE + 2)
    side = side_of(slots)
    prompts = [[nth, *LONG[1:]] for nth in range(slots // (AT_ONCE + 2) + 3)]
    free = []
    for nth, prompt in enumerate(prompts):
        order = saving(side, str(nth), prompt)
        side.name()
        free.append(side.directory._shelves[0].table.free_count)
        side.settle(saved(order))
        side.directory.check()
    assert free[-4:] == [AT_ONCE + 2] * 4
    assert [side.match([*prompt, 0]).tokens for prompt in prompts[-AHEAD_SHARE:]] == [len(LONG)] * AHEAD_SHARE


def test_a_save_that_failed_on_one_rank_is_never_visible():
    side = side_of(16, 16)
    order = side.save_order("cold", TOKENS, 0, len(TOKENS), [TABLE])
    side.settle(saved(order), 0)
    side.settle(saved(order, good=False), 1)
    assert side.match(TOKENS).tokens == 0
    assert side.idle
    side.directory.check()


@pytest.mark.parametrize(("window", "hidden"), [(1, 0), (4, 1 << 20), (0, 7)])
def test_an_order_moves_layers_and_is_said_to_have_come_as_was_decided(window, hidden):
    side = side_of(16)
    store(side)
    match = side.match(TOKENS)
    decided = replace(match.decision, window=window, hidden_bytes=hidden)
    order = side.load_order("warm", replace(match, decision=decided), [TABLE])
    assert (order.window, order.hidden_bytes) == (window, hidden)
    side.settle(loaded(order), 0)


def test_a_lease_lasts_until_the_load_has_ended_on_every_rank():
    side = side_of(16, 16)
    store(side)
    order = side.load_order("warm", side.match(TOKENS), [TABLE])
    side.settle(loaded(order), 0)
    assert not side.idle
    side.settle(loaded(order), 1)
    assert side.idle
    side.directory.check()


def test_a_block_found_bad_on_one_rank_is_forgotten_on_all():
    side = side_of(16, 16)
    store(side)
    order = side.load_order("warm", side.match(TOKENS), [TABLE])
    side.settle(loaded(order), 0)
    side.settle(loaded(order, LoadEnd.CORRUPT, [(0, order.pairs[0].slots[3])]), 1)
    assert side.match(TOKENS).tokens == 3 * BLOCK
    assert side.idle


@pytest.mark.parametrize("shared_blocks", [False, True])
def test_where_requests_share_blocks_a_failed_load_dooms_every_save_under_way(shared_blocks):
    side = side_of(32, shared_blocks=shared_blocks)
    store(side)
    load = side.load_order("warm", side.match(TOKENS), [TABLE])
    other = [*TOKENS[: 8 * BLOCK], *range(BLOCK)]
    save = side.save_order("reader", other, 8 * BLOCK, 9 * BLOCK, [[*TABLE, 9]])
    side.settle(loaded(load, LoadEnd.LOST))
    side.settle(saved(save))
    assert side.match([*other, 0]).tokens == (8 if shared_blocks else 9) * BLOCK
    assert side.idle


@pytest.mark.parametrize("held", range(9))
def test_tokens_that_the_engine_holds_are_not_loaded_again(held):
    side = side_of(16)
    store(side)
    match = side.match(TOKENS, local_tokens=held * BLOCK)
    if held == 8:
        assert (match.tokens, match.needed, match.miss) == (0, (range(0),), MissReason.HELD)
    else:
        assert (match.tokens, match.needed) == (8 * BLOCK, (range(held, 8),))


def test_a_prompt_for_which_there_was_no_room_says_so_beside_others_that_are_there():
    """A pool of a few blocks: what did not fit was called "never saved", and nobody thought of its size."""
    side = side_of(4)
    for first in range(3):
        side.settle(saved(side.save_order(f"short {first}", [first] * BLOCK, 0, BLOCK, [[1]])))
    assert side.match(TOKENS).miss is MissReason.NEVER_STORED
    assert side.save_order("long", TOKENS, 0, len(TOKENS), [TABLE]) is None
    assert side.match(TOKENS).miss is MissReason.NO_ROOM
    assert side.match([0] * 2 * BLOCK).tokens == BLOCK, "what is there stays"
    assert side.match([9, *TOKENS[1:]]).miss is MissReason.NEVER_STORED, "of others it is not said"
    side.settle(saved(side.save_order("part", TOKENS, 0, 3 * BLOCK, [TABLE])))
    assert side.match(TOKENS).tokens == 3 * BLOCK
    side.directory.check()


def test_a_prompt_that_is_being_saved_is_not_called_never_saved():
    side = side_of(16)
    order = side.save_order("cold", TOKENS, 0, len(TOKENS), [TABLE])
    assert side.match(TOKENS).miss is MissReason.SAVING
    side.settle(saved(order))
    assert side.match(TOKENS).tokens == 8 * BLOCK


def test_a_prompt_of_one_block_is_too_short_whether_that_block_is_there_or_not():
    side = side_of(16)
    assert side.match(TOKENS[:BLOCK]).miss is MissReason.SHORT
    store(side)
    assert side.match(TOKENS[:BLOCK]).miss is MissReason.SHORT
    assert side.match(TOKENS[: BLOCK + 1]).tokens == BLOCK


def test_a_prompt_that_is_there_in_one_kind_of_cache_only_is_not_called_never_saved():
    specs = (*SPECS, GroupSpec("state", GroupKind.RECURRENT, BLOCK, (LAYERS,)))
    names = identities_of(ByteEngine(specs, 2).layout, model="m")
    side = scheduler_side([WorkerFacts(specs, names, (16, 1))], Config(kv_recompute_threshold=0, host_bytes=1), False)
    order = side.save_order("cold", TOKENS, 0, len(TOKENS), [TABLE, [None] * 8])
    side.settle(saved(order))
    assert side.match(TOKENS).miss is MissReason.TOO_LITTLE
    for prompt in (TOKENS, [9] * (BLOCK + 1)):  # its one snapshot, and another prompt's in place of it
        end = len(prompt) // BLOCK
        side.settle(saved(side.save_order(f"of {end}", prompt, 0, len(prompt), [TABLE, [*[None] * (end - 1), 1]])))
    assert side.match(TOKENS).miss is MissReason.EVICTED


def test_the_threshold_counts_only_what_would_be_loaded():
    facts = [WorkerFacts(SPECS, IDENTITIES, (16,))]
    side = scheduler_side(facts, Config(kv_recompute_threshold=2 * BLOCK, host_bytes=1), False)
    store(side)
    assert side.match(TOKENS, local_tokens=6 * BLOCK).tokens == 8 * BLOCK
    assert side.match(TOKENS, local_tokens=7 * BLOCK).miss is MissReason.BELOW_THRESHOLD


def test_every_rank_can_hold_every_slot():
    side = side_of(9, 7, 8)
    assert side.directory.room() == (7,)


def test_ranks_that_registered_other_content_are_refused():
    other = (GroupSpec("full", GroupKind.FULL, 2 * BLOCK, tuple(range(LAYERS))),)
    with pytest.raises(LayoutMismatch, match="rank 1"):
        scheduler_side([WorkerFacts(SPECS, IDENTITIES, (8,)), WorkerFacts(other, IDENTITIES, (8,))], Config(), False)


def test_what_cant_be_named_is_neither_found_nor_saved():
    side = side_of(16)
    unnamed = {0: [Extra(ExtraKind.ADAPTER, b"")]}
    assert side.match(TOKENS, unnamed).miss is MissReason.NOT_CACHEABLE
    assert side.save_order("r", TOKENS, 0, len(TOKENS), [TABLE], unnamed) is None
    assert side.idle


@pytest.mark.parametrize("verified", [True, False])
def test_a_load_whose_lease_ended_before_its_last_byte_was_read_stands_only_if_digests_say_so(verified):
    """Its slots may have been another's meanwhile, and without digests nobody would notice."""
    side = side_of(16)
    store(side)
    order = side.load_order("warm", side.match(TOKENS), [TABLE])
    save = side.save_order("warm", [*TOKENS, *range(7)], 8 * BLOCK, 9 * BLOCK, [[*TABLE, 9]])
    side.directory.expire(float("inf"))
    settled = side.settle(loaded(order, verified=verified))
    side.settle(saved(save))
    assert settled.failed == (() if verified else ("warm",))
    assert [outcome.end for outcome in settled.loads] == [LoadEnd.LANDED if verified else LoadEnd.LOST]
    assert side.match([*TOKENS, *range(7)]).tokens == (9 if verified else 8) * BLOCK
    assert side.idle


def test_a_load_into_memory_that_is_not_there_holds_no_lease():
    side = side_of(16)
    store(side)
    with pytest.raises(BadBlocks):
        side.load_order("warm", side.match(TOKENS), [[1, 2, None, 4, 5, 6, 7, 8]])
    assert side.idle


@pytest.mark.parametrize("at", [0, 1, 3, 4, 5])
def test_an_extra_changes_the_keys_of_its_block_in_groups_of_any_block_size(at):
    """It is named by the smallest block: a snapshot of 16 tokens depends on the extras of four blocks of 4."""
    specs = (
        GroupSpec("full", GroupKind.FULL, 4, (0,)),
        GroupSpec("state", GroupKind.RECURRENT, 16, (1,)),
        GroupSpec("odd", GroupKind.FULL, 6, (2,)),
    )
    fact = WorkerFacts(specs, identities_of(ByteEngine(specs, 2).layout, model="m"), (16, 16, 16))
    side = scheduler_side([fact], Config(kv_recompute_threshold=0, host_bytes=1), False)
    bare = side.match(TOKENS).keys
    salted = side.match(TOKENS, {at: [Extra(ExtraKind.SALT, b"tenant")]}).keys
    assert len({key for group in bare for key in group}) == 8 + 2 + 5
    for size, ours, theirs in zip((4, 16, 6), bare, salted, strict=True):
        same = [mine == other for mine, other in zip(ours, theirs, strict=True)]
        assert same == [(block + 1) * size <= at * 4 for block in range(len(ours))]


def test_where_an_extra_lies_inside_a_larger_block_is_part_of_its_key():
    specs = (GroupSpec("full", GroupKind.FULL, 4, (0,)), GroupSpec("state", GroupKind.RECURRENT, 16, (1,)))
    fact = WorkerFacts(specs, identities_of(ByteEngine(specs, 2).layout, model="m"), (16, 16))
    side = scheduler_side([fact], Config(kv_recompute_threshold=0, host_bytes=1), False)
    keys = {side.match(TOKENS, {at: [Extra(ExtraKind.SALT, b"tenant")]}).keys[1][0] for at in range(4)}
    assert len(keys) == 4


@pytest.mark.parametrize("running", [0, 1])
def test_a_load_in_the_background_keeps_its_slots_however_long_it_waits_behind_others(running):
    """Inside a forward the wait is bounded; there the lease has an end, and an unverified load behind it is lost."""
    side = side_of(8, lease_s=0.001)
    store(side)
    order = side.load_order("hit", side.match(TOKENS, company=Company(running)), [TABLE])
    time.sleep(0.002)
    other = side.save_order("other", [9, *TOKENS], 0, len(TOKENS), [TABLE])
    assert (other is None) == bool(running)
    (load,) = side.settle(loaded(order, verified=False)).loads
    assert load.end is (LoadEnd.LANDED if running else LoadEnd.LOST)
    if other is not None:
        side.settle(saved(other))
    assert side.idle
    side.directory.check()


def test_what_was_being_saved_when_the_identity_changed_is_never_said_to_be_stored():
    side = side_of(32)
    side.directory.record()
    order = side.save_order("cold", TOKENS, 0, len(TOKENS), [TABLE])
    side.renew()
    side.settle(saved(order))
    assert side.directory.changes.take() == []
    assert side.directory.room() == (32,)
    assert side.idle
