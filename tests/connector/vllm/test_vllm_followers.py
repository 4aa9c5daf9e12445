"""Whom a request waits for whose blocks are being loaded for another already, from values in vLLM's shapes."""

from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from layercast.config import Config
from layercast.connector.vllm.forwards import Forwards
from layercast.connector.vllm.scheduler import SchedulerHooks
from layercast.connector.vllm.terms import Terms
from layercast.connector.vllm.tracked import Tracked
from layercast.control.scheduler import Match
from layercast.flow.orders import LoadOrder
from layercast.plan.policy import NO_HIT, Decision, Mode
from layercast.plan.prefix import Usable

BLOCK, MOST = 16, 60
PARKED = Decision(Mode.BACKGROUND, 1, "others are running")


def match_of(prompt, held, end, decision=PARKED):
    """Blocks [held, end) of a prompt are to be loaded."""
    keys = tuple(bytes([prompt, at]) for at in range(MOST))
    return Match(Usable(end * BLOCK, (range(held, end),)), (keys,), decision)


def loading(name, match):
    """A request whose load of these is under way in the background."""
    order = LoadOrder(f"load-{name}", name, match.usable.tokens, ())
    known = Tracked(SimpleNamespace(request_id=name), {}, load=True, save=True, match=match)
    known.parked, known.loading = True, order
    return known


def waits(known, match, *others, shared=True):
    """Whether a request for which this is found is told to ask again, beside those for which something is loaded."""
    name, params = known.request.request_id, SimpleNamespace(enable_prefix_caching=shared)
    known.request.skip_reading_prefix_cache, known.request.block_hashes = False, ()
    known.request.all_token_ids = ()
    side = SimpleNamespace(
        specs=(),
        match=lambda *_: match,
        rising=lambda *_: False,
        backing=SimpleNamespace(fetched=lambda _: False),
        chooser=SimpleNamespace(rates=SimpleNamespace(estimate=None)),
    )
    hooks = SimpleNamespace(
        side=side,
        _side=side,
        config=Config(),
        tracked={name: known} | {other.request.request_id: other for other in others},
        _track=lambda _: known,
        _terms=Terms(loads=True, saves=True, digested=0, spare_last=False, at_once=True),
        _vllm_config=SimpleNamespace(cache_config=params),
        _forwards=Forwards(64, 1),
    )
    hooks._comes_for_another = partial(SchedulerHooks._comes_for_another, hooks)
    return SchedulerHooks.get_num_new_matched_tokens(hooks, known.request, match.needed[0].start * BLOCK)[0] is None


def asking(match):
    return Tracked(SimpleNamespace(request_id="asking"), {}, load=True, save=True, match=match)


def test_what_is_being_loaded_for_another_is_waited_for_where_vllm_keeps_it():
    wanted = match_of(1, 0, 40)
    first = loading("first", match_of(1, 0, 40))
    assert waits(asking(wanted), wanted, first)
    assert not waits(asking(wanted), wanted, first, shared=False)
    assert not waits(asking(wanted), wanted, loading("stranger", match_of(2, 0, 40)))
    first.loading = None
    assert not waits(asking(wanted), wanted, first)


def test_what_would_not_be_loaded_is_waited_for_by_nobody():
    """A few blocks that two prompts share are computed sooner than a whole conversation comes for the other one."""
    wanted = match_of(1, 0, 40)
    computed = msgspec.structs.replace(wanted, decision=NO_HIT)
    assert not waits(asking(computed), computed, loading("first", wanted))


def test_no_request_waits_for_a_load_of_its_own():
    """vLLM has rewound it, as it shared blocks with a load that has failed: what still comes, nobody will find."""
    wanted = match_of(1, 0, 40)
    rewound = loading("rewound", wanted)
    assert not waits(rewound, wanted)
    assert waits(rewound, wanted, loading("first", match_of(1, 0, 40)))


ranges = st.tuples(st.integers(0, MOST), st.integers(0, MOST)).map(sorted)


@given(ranges, ranges)
def test_a_load_that_is_waited_for_brings_half_of_what_is_wanted_and_is_no_more_than_twice_as_much(mine, asked):
    """What brings no half of it comes too late, and what is far more keeps it waiting for what it does not need."""
    wanted, first = match_of(1, *asked), loading("first", match_of(1, *mine))
    half = range(asked[0], asked[0] + len(range(*asked)) // 2 + 1)
    brings = set(half) <= set(range(*mine)) and len(range(*mine)) <= 2 * len(range(*asked))
    assert waits(asking(wanted), wanted, first) == (brings and asked[0] < asked[1])
