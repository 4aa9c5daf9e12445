"""What an engine settles once for all requests, and what is done for none where nobody looks, in vLLM's shapes."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig

from layercast.connector.vllm.scheduler import SchedulerHooks
from layercast.connector.vllm.terms import terms_of
from layercast.connector.vllm.tracked import Tracked, first_sight
from layercast.observe.receipts import MissReason, receipts_in
from layercast.spec.groups import GroupKind, GroupSpec

SPECS = (GroupSpec("full", GroupKind.FULL, 16, (0,)),)


def terms(role):
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256", block_size=16)
    config = SimpleNamespace(cache_config=cache, speculative_config=None)
    transfer = KVTransferConfig(kv_connector="LayercastConnector", kv_role=role)
    return terms_of(config, SimpleNamespace(kv_cache_groups=[None]), transfer, SPECS)


def request():
    return SimpleNamespace(
        request_id="r", kv_transfer_params=None, cache_salt=None, num_prompt_tokens=9, block_hashes=[], all_token_ids=[]
    )


@pytest.mark.parametrize(
    ("role", "load", "save", "miss"),
    [
        ("kv_both", True, True, None),
        ("kv_consumer", True, False, None),
        ("kv_producer", False, True, MissReason.PRODUCER),
    ],
)
def test_a_request_that_states_nothing_may_what_its_engine_s_role_lets_it(role, load, save, miss):
    known, _ = first_sight(request(), terms(role))
    assert (known.load, known.save, known.miss, known.digested) == (load, save, miss, 16)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_receipt_is_made_only_where_the_log_takes_it(caplog, monkeypatch, level):
    made, make = [], Tracked.receipt
    monkeypatch.setattr(Tracked, "receipt", lambda known, layout: made.append(layout) or make(known, layout))
    known, _ = first_sight(request(), terms("kv_both"))
    with caplog.at_level(level, "layercast"):
        SchedulerHooks._leave_receipt(SimpleNamespace(_layout="NHD"), known)
    told = [one.layout for one in receipts_in(caplog.messages, "r")]
    assert made == told == (["NHD"] if level == logging.INFO else [])
