"""What loads and forwards cost, from what they took."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.control.rates import FORGET_S, KEPT, LARGE, Rates
from layercast.plan.policy import ALONE, Company, Hit, Mode, Rules, decide


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def rates(clock):
    return Rates(clock)


def test_nothing_is_known_before_a_load_and_a_large_forward_have_been_seen(rates):
    assert rates.estimate is None
    rates.computed(LARGE, 0.1)
    assert rates.estimate is None
    rates.loaded(1000, 0.5)
    assert rates.estimate is not None
    empty = Rates(Clock())
    empty.loaded(1000, 0.5)
    empty.computed(LARGE - 1, 0.1)
    assert empty.estimate is None


def test_loads_that_queue_behind_one_another_do_not_make_the_link_look_slow(rates):
    """Four that are asked for at once: the last one took four times as long as the link needed for it."""
    rates.computed(100, 1.0)
    for behind in range(1, 5):
        rates.loaded(9000, 1.0 * behind)
    assert rates.estimate.link_bytes_per_s == 9000


def test_a_token_costs_what_it_adds_in_large_forwards_to_the_least_of_the_small_ones(rates):
    rates.loaded(1, 1.0)
    for seconds in (0.1, 0.3, 0.2):
        rates.computed(100, seconds)
    rates.computed(1, 0.05)
    assert rates.estimate.token_s == pytest.approx(0.0015)
    assert rates.estimate.compute_s(10) == pytest.approx(0.065)
    assert rates.estimate.compute_s(1000) == pytest.approx(1.55)


HIT = Hit(8192, 1 << 30, 512)
RULES = Rules(threshold=256, use_layerwise=True, window=1, layers=32, exposed_s=0.005)


@given(
    st.lists(st.tuples(st.integers(LARGE, 512), st.floats(0.010, 0.016)), min_size=1, max_size=KEPT),
    st.lists(st.floats(0.009, 0.020), max_size=KEPT),
    st.integers(0, 3),
)
def test_forwards_that_waited_for_their_launches_do_not_make_computing_look_free(short, small, long):
    """An H200: 8,192 tokens take 210 ms to compute and 20 to load, and a forward of few tokens 10 to 20, whatever it
    computes. Hits were computed there after small forwards on a cold host had taken longer than larger ones."""
    rates = Rates(Clock())
    rates.loaded(1 << 28, 0.0055)
    for seconds in small:
        rates.computed(8, seconds)
    for tokens, seconds in [(2048, 0.049)] * long + short:
        rates.computed(tokens, seconds)
    assert decide(HIT, RULES, ALONE, rates.estimate).mode is Mode.LAYERWISE


def test_the_cost_of_a_token_is_told_by_the_largest_forwards(rates):
    rates.loaded(1, 1.0)
    rates.computed(8, 0.015)
    for tokens, seconds in [(2048, 0.049)] * 3 + [(256, 0.014)] * 10:
        rates.computed(tokens, seconds)
    assert rates.estimate.token_s == pytest.approx(0.034 / 2048)


def test_one_forward_that_is_larger_and_slower_than_all_others_does_not_make_computing_look_dear(rates):
    """The first large one of an engine may compile or tune for seconds; hits were loaded that were quicker computed."""
    rates.loaded(1 << 30, 1.0)
    rates.computed(8, 0.010)
    for tokens, seconds in [(8192, 5.0)] + [(2048, 0.059)] * 5:
        rates.computed(tokens, seconds)
    assert rates.estimate.token_s == pytest.approx(0.049 / 2048)
    assert decide(HIT, RULES, ALONE, rates.estimate).mode is Mode.RECOMPUTE


def test_the_end_of_a_prompt_takes_as_long_as_such_ends_have_taken_whatever_a_token_costs(rates):
    """An H200: 2,048 tokens take 49 ms, 130 take 17 as they wait for their launches, and a step that decodes takes 4.
    By the cost of a token it would be 7, and a load of 20 ms that would hide behind 17 was made to wait for 40."""
    rates.loaded(1 << 30, 0.0205)
    rates.computed(8, 0.004)
    for tokens, seconds in [(2048, 0.049)] * 3 + [(140, 0.017), (130, 0.016), (135, 0.040), (260, 0.020), (133, 0.017)]:
        rates.computed(tokens, seconds)
    assert rates.estimate.compute_s(128 + 6) == pytest.approx(0.017)
    assert rates.estimate.compute_s(65) == pytest.approx(0.017 / 2)
    assert rates.estimate.compute_s(2048) == pytest.approx(0.049)
    assert decide(Hit(8192, 1 << 30, 128), RULES, Company(6, 0, 6), rates.estimate).mode is Mode.LAYERWISE


@given(
    st.lists(st.tuples(st.integers(LARGE, 4096), st.floats(0.001, 0.3)), min_size=1, max_size=KEPT), st.floats(0, 0.1)
)
def test_more_tokens_never_take_less_time_nor_any_of_them_more(forwards, small_s):
    rates = Rates(Clock())
    rates.loaded(1, 1.0)
    rates.computed(1, small_s)
    for tokens, seconds in forwards:
        rates.computed(tokens, seconds)
    times = [rates.estimate.compute_s(tokens) for tokens in range(1, 5000, 7)]
    each = [seconds / tokens for seconds, tokens in zip(times, range(1, 5000, 7), strict=True)]
    assert times == sorted(times)
    assert all(later <= before * (1 + 1e-9) for before, later in pairwise(each))


def test_a_short_forward_that_was_slower_than_all_larger_ones_makes_no_forward_seem_slow(rates):
    """It was the first of its size: what is believed of it would hide any load behind any forward."""
    rates.loaded(1 << 30, 0.05)
    for tokens, seconds in [(LARGE, 5.0)] + [(2048, 0.05)] * 3:
        rates.computed(tokens, seconds)
    assert rates.estimate.compute_s(LARGE) == rates.estimate.compute_s(2048) == pytest.approx(0.05)
    assert decide(HIT, RULES, Company(1, 1 << 30), rates.estimate).parked


def test_where_no_small_forward_was_seen_a_large_one_is_all_tokens(rates):
    rates.loaded(1, 1.0)
    rates.computed(100, 0.2)
    assert rates.estimate.compute_s(50) == pytest.approx(0.1)


def test_only_the_last_ones_count(rates):
    for _ in range(KEPT):
        rates.loaded(1, 1.0)
        rates.computed(100, 9.0)
    for _ in range(KEPT):
        rates.loaded(50, 1.0)
        rates.computed(100, 1.0)
    assert (rates.estimate.link_bytes_per_s, rates.estimate.token_s) == (50, 0.01)


def test_a_slow_spell_is_forgotten_where_nothing_is_loaded_any_more(rates, clock):
    rates.computed(100, 1.0)
    rates.loaded(1, 10.0)
    clock.now += FORGET_S + 1
    assert rates.estimate is None
    rates.loaded(1000, 1.0)
    assert rates.estimate.link_bytes_per_s == 1000


def test_what_took_no_time_or_moved_nothing_tells_nothing(rates):
    rates.loaded(0, 1.0)
    rates.loaded(10, 0.0)
    rates.computed(0, 1.0)
    rates.computed(100, 0.0)
    assert rates.estimate is None
