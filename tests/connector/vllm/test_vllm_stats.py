"""What the metrics' help says, since a dashboard shows nothing else of them."""

import pytest

pytest.importorskip("vllm")

from layercast.connector.vllm.stats import COUNTERS, PEAKS


def test_every_metrics_help_names_the_unit_of_its_name_and_no_two_are_alike():
    helps = {name: text for name, (_, text) in {**COUNTERS, **PEAKS}.items()}
    for name, text in helps.items():
        for unit in ("seconds", "bytes", "layers", "tokens"):
            assert unit not in name.split("_") or unit in text.lower(), name
    assert len(set(helps.values())) == len(helps)


@pytest.mark.parametrize(("name", "words"), [("transfer_seconds", ("from", "until")), ("exposed_seconds", ("waited",))])
def test_a_time_says_from_when_to_when(name, words):
    assert all(word in COUNTERS[name][1] for word in words)
