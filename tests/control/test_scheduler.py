"""The scheduler side alone: many ranks report, tokens held by the engine are not loaded, and doubt spreads."""

import pytest

from layercast.config import Config
from layercast.control.node import scheduler_side
from layercast.control.scheduler import WorkerFacts
from layercast.errors import LayoutMismatch
from layercast.flow.orders import LoadEnd, LoadOutcome, SaveOutcome, StepReport
from layercast.observe.receipts import MissReason
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.spec.identities import identities_of
from layercast.testing.oracle import ByteEngine

BLOCK, LAYERS = 4, 3
SPECS = (GroupSpec("full", GroupKind.FULL, BLOCK, tuple(range(LAYERS))),)
IDENTITIES = identities_of(ByteEngine(SPECS, 2).layout, model="m")
TOKENS = list(range(100, 100 + 8 * BLOCK + 1))
TABLE = list(range(1, 9))


def side_of(*slots, shared_blocks=False):
    facts = [WorkerFacts(SPECS, IDENTITIES, (count,)) for count in slots]
    return scheduler_side(facts, Config(kv_recompute_threshold=0, host_bytes=1), shared_blocks)


def saved(order, good=True):
    return StepReport(0, (), (), (SaveOutcome(order.id, order.request, good, 1, LAYERS, 0),))


def loaded(order, end=LoadEnd.LANDED, bad=()):
    failed = () if end is LoadEnd.LANDED else (order.request,)
    outcome = LoadOutcome(order.id, order.request, end, 1, LAYERS, True, 0.0, 0.0, "", tuple(bad))
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


def test_a_save_that_failed_on_one_rank_is_never_visible():
    side = side_of(16, 16)
    order = side.save_order("cold", TOKENS, 0, len(TOKENS), [TABLE])
    side.settle(saved(order), 0)
    side.settle(saved(order, good=False), 1)
    assert side.match(TOKENS).tokens == 0
    assert side.idle
    side.directory.check()


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
        assert (match.tokens, match.needed) == (0, ((),))
    else:
        assert (match.tokens, match.needed) == (8 * BLOCK, (tuple(range(held, 8)),))


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
