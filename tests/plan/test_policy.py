import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.plan.policy import Company, Decision, Estimate, Hit, Mode, Rules, decide

BYTES, TOKENS = 1 << 30, 8192
RULES = Rules(threshold=64, use_layerwise=True, window=1, layers=32, exposed_s=0.005)
COSTS = Estimate(link_bytes_per_s=50e9, token_s=40e-6, forward_s=7e-3)
"""Of one GPU and an 8B model: the hit's gigabyte takes 21 ms."""


def choose(tokens=TOKENS, *, nbytes=BYTES, rest=512, running=0, estimate=COSTS, company=None, **rules):
    changed = Rules(**{name: rules.get(name, getattr(RULES, name)) for name in Rules.__struct_fields__})
    return decide(Hit(tokens, nbytes, rest), changed, company or Company(running), estimate)


@pytest.mark.parametrize(("tokens", "threshold"), [(0, 0), (0, 64), (63, 64)])
def test_a_hit_below_the_threshold_is_computed_again(tokens, threshold):
    assert choose(tokens, threshold=threshold, estimate=None).mode is Mode.RECOMPUTE


def test_a_hit_at_the_threshold_is_loaded_layer_by_layer():
    decision = choose(64, window=4, estimate=None)
    assert (decision.mode, decision.window, decision.parked) == (Mode.LAYERWISE, 4, False)


@pytest.mark.parametrize("rules", [{"use_layerwise": False}, {"window": 32}, {"window": 99}, {"layers": 1}])
def test_layerwise_off_or_one_window_for_all_layers_is_bulk(rules):
    decision = choose(**rules)
    assert (decision.mode, decision.window) == (Mode.BULK, 0)


def test_a_load_that_takes_longer_than_computing_everything_is_not_made():
    slow = Estimate(link_bytes_per_s=BYTES / 0.36, token_s=40e-6, forward_s=7e-3)
    assert choose(estimate=slow).mode is Mode.RECOMPUTE
    assert choose(rest=1024, estimate=slow).mode is Mode.LAYERWISE
    assert choose(rest=1024, estimate=slow, use_layerwise=False).mode is Mode.RECOMPUTE


def test_a_threshold_of_nothing_loads_whatever_it_costs():
    assert choose(threshold=0, estimate=Estimate(1.0, 1e-9, 1e-9)).mode is Mode.LAYERWISE


def test_alone_a_request_loads_in_its_forward_however_long_that_waits():
    assert choose(rest=1).mode is Mode.LAYERWISE


def test_beside_others_a_load_that_hides_behind_its_forward_is_layerwise():
    assert choose(rest=2048, running=32).mode is Mode.LAYERWISE
    assert choose(rest=2048, running=32, exposed_s=0.0).mode is Mode.LAYERWISE


def test_what_else_the_coming_forward_loads_and_computes_and_when_it_begins_says_whether_a_load_hides():
    assert choose(rest=128, company=Company(6)).parked
    assert not choose(rest=128, company=Company(6, ahead_s=0.006)).parked
    assert not choose(rest=128, company=Company(6, tokens=512)).parked
    assert not choose(rest=512, company=Company(6)).parked
    assert choose(rest=512, company=Company(6, nbytes=BYTES)).parked


def test_beside_others_a_load_that_would_hold_them_up_goes_first_to_the_background():
    decision = choose(rest=64, running=32)
    assert decision.mode is Mode.BACKGROUND_LAYERWISE
    assert decision.parked
    assert "32 others" in decision.reason


@pytest.mark.parametrize("told_ahead", [1, 2])
def test_what_comes_before_its_forward_or_behind_it_or_while_others_may_wait_need_not_be_there_when_it_is_said(
    told_ahead,
):
    decision = choose(rest=64, running=32, nbytes=2 * BYTES, told_ahead=told_ahead)
    later_s = told_ahead * COSTS.forward_s + COSTS.compute_s(64) + RULES.exposed_s
    assert decision.hidden_bytes == pytest.approx(COSTS.link_bytes_per_s * later_s, abs=2)
    assert choose(rest=64, running=32, told_ahead=9).hidden_bytes == BYTES


def test_where_not_one_window_would_hide_all_of_it_goes_to_the_background():
    costs = Estimate(link_bytes_per_s=1e9, token_s=40e-6, forward_s=7e-3)
    assert choose(nbytes=BYTES // 4, rest=1, running=1, estimate=costs).mode is Mode.BACKGROUND


def test_bulk_hides_nothing_so_beside_others_it_goes_to_the_background():
    assert choose(rest=2048, running=1, use_layerwise=False).mode is Mode.BACKGROUND
    assert choose(rest=2048, running=1, use_layerwise=False, exposed_s=0.03).mode is Mode.BULK


def test_beside_others_what_is_not_known_yet_is_tried_in_the_background():
    assert choose(running=1, estimate=None).mode is Mode.BACKGROUND


def test_what_comes_while_a_forward_is_under_way_holds_nobody_up():
    assert choose(rest=128, company=Company(6, 0, 6)).parked
    assert choose(rest=128, company=Company(6, 0, 6, ahead_s=0.006)).mode is Mode.LAYERWISE
    assert choose(rest=128, company=Company(6, 0, 6, ahead_s=0.006), use_layerwise=False).parked
    assert choose(rest=128, company=Company(6, 0, 6, ahead_s=0.018), use_layerwise=False).mode is Mode.BULK


def test_what_the_coming_forward_loads_already_counts():
    assert choose(rest=2048, company=Company(1, 4 * BYTES, 0)).mode is not Mode.LAYERWISE
    assert choose(rest=2048, company=Company(1, 4 * BYTES, 4 * 2048)).mode is Mode.LAYERWISE


def test_a_load_behind_others_is_not_made_where_computing_beside_them_is_faster():
    """The second of two hits in a forward: its bytes would come behind the first's, while nothing computes."""
    slow = Estimate(link_bytes_per_s=BYTES / 0.27, token_s=40e-6, forward_s=7e-3)
    assert choose(estimate=slow).mode is Mode.LAYERWISE
    second = choose(estimate=slow, company=Company(0, BYTES, 512))
    assert second.mode is Mode.RECOMPUTE
    assert "with a load (layerwise) 540 ms" in second.reason


def test_where_no_load_may_be_in_a_forward_it_is_in_the_background():
    assert choose(in_forward=False).mode is Mode.BACKGROUND
    assert choose(in_forward=False, use_layerwise=False) == Decision(
        Mode.BACKGROUND, 0, choose(in_forward=False).reason
    )


def test_a_short_hit_is_not_parked_for_nothing():
    """A forward over 64 tokens more takes no longer; waiting for a load would."""
    assert choose(64, nbytes=8 << 20, rest=64, in_forward=False).mode is Mode.RECOMPUTE


@given(
    tokens=st.integers(1, 200_000),
    rest=st.integers(1, 8192),
    token_bytes=st.integers(1, 1 << 18),
    running=st.integers(0, 300),
    link=st.floats(1e6, 1e11),
    token_s=st.floats(1e-7, 1e-2),
    forward_s=st.floats(1e-5, 1e-1),
    layerwise=st.booleans(),
    window=st.integers(1, 40),
    told_ahead=st.integers(0, 3),
    others_bytes=st.just(0) | st.integers(0, 1 << 34),
    others_tokens=st.integers(0, 8192),
    ahead_s=st.just(0.0) | st.floats(0, 0.1),
)
def test_nobody_waits_longer_than_allowed_and_no_answer_comes_later_than_without_a_load(
    tokens,
    rest,
    token_bytes,
    running,
    link,
    token_s,
    forward_s,
    layerwise,
    window,
    told_ahead,
    others_bytes,
    others_tokens,
    ahead_s,
):
    costs, nbytes = Estimate(link, token_s, forward_s), tokens * token_bytes
    rules = {"use_layerwise": layerwise, "window": window, "told_ahead": told_ahead}
    company = Company(running, others_bytes, others_tokens, ahead_s)
    decision = choose(tokens, nbytes=nbytes, rest=rest, company=company, estimate=costs, **rules)
    if decision.mode is Mode.RECOMPUTE:
        return
    transfer_s, rest_s = costs.transfer_s(others_bytes + nbytes), costs.compute_s(others_tokens + rest)
    if running and decision.mode is Mode.LAYERWISE:
        assert transfer_s - ahead_s - rest_s <= RULES.exposed_s + 1e-9
    if running and decision.mode is Mode.BULK:
        assert transfer_s - ahead_s <= RULES.exposed_s + 1e-9
    if decision.mode is Mode.BACKGROUND_LAYERWISE:
        later_s = rest_s + told_ahead * forward_s + RULES.exposed_s
        assert 0 < decision.hidden_bytes <= min(nbytes, later_s * link - others_bytes + 1)
    before_s = told_ahead * forward_s if decision.parked else ahead_s
    best_s = max(transfer_s, before_s + costs.compute_s(rest))
    alone_s = max(costs.transfer_s(others_bytes), ahead_s + costs.compute_s(others_tokens + tokens + rest))
    assert best_s <= alone_s or tokens < RULES.threshold
