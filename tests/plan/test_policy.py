import pytest

from layercast.plan.policy import Estimate, Mode, decide


def choose(tokens=1000, *, threshold=64, use_layerwise=True, window=1, layers=28, nbytes=1 << 30, estimate=None):
    return decide(
        tokens,
        threshold=threshold,
        use_layerwise=use_layerwise,
        window=window,
        layers=layers,
        nbytes=nbytes,
        estimate=estimate,
    )


@pytest.mark.parametrize(("tokens", "threshold"), [(0, 0), (0, 64), (63, 64)])
def test_a_hit_below_the_threshold_is_computed_again(tokens, threshold):
    assert choose(tokens, threshold=threshold).mode is Mode.RECOMPUTE


def test_a_hit_at_the_threshold_is_loaded_layer_by_layer():
    decision = choose(64, window=4)
    assert (decision.mode, decision.window) == (Mode.LAYERWISE, 4)


@pytest.mark.parametrize("settings", [{"use_layerwise": False}, {"window": 28}, {"window": 99}, {"layers": 1}])
def test_layerwise_off_or_one_window_for_all_layers_is_bulk(settings):
    decision = choose(**settings)
    assert (decision.mode, decision.window) == (Mode.BULK, 0)


def test_a_load_that_takes_longer_than_computing_is_not_made():
    assert choose(estimate=Estimate(link_bytes_per_s=1e9, recompute_s=1.0)).mode is Mode.RECOMPUTE
    assert choose(estimate=Estimate(link_bytes_per_s=2e9, recompute_s=1.0)).mode is Mode.LAYERWISE
