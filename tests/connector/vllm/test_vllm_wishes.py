"""What a request may ask of the pool, and what becomes of a wish that can't be read."""

from itertools import permutations
from types import SimpleNamespace

import pytest

from layercast.connector.vllm.tracked import Tracked, Wishes, wishes_of
from layercast.flow.orders import LoadEnd, LoadOutcome
from layercast.observe.receipts import MissReason


def asking(wishes):
    return SimpleNamespace(request_id="r", kv_transfer_params={"layercast": wishes}, num_prompt_tokens=9)


def test_a_request_that_states_nothing_loads_and_saves():
    assert wishes_of(SimpleNamespace(kv_transfer_params=None)) == (Wishes(), False, "")


@pytest.mark.parametrize("wishes", [{"loda": 1}, 5, {"salt": 3}, {"load": "false"}])
def test_what_cannot_be_read_neither_loads_nor_saves_and_the_reply_says_what_is_wrong(wishes):
    read, stated, problem = wishes_of(asking(wishes))
    assert (read.load, read.save, stated) == (False, False, True)
    known = Tracked(
        asking(wishes), {}, load=False, save=False, told=stated, problem=problem, miss=MissReason.UNREADABLE
    )
    assert problem in known.reply["layercast"]["miss"]
    assert known.receipt("").detail == problem
    assert problem


@pytest.mark.parametrize("key", ["layercst", "layer_cast", "Layercast", "layercasts"])
def test_wishes_under_a_key_that_was_meant_for_them_are_not_passed_over(key):
    read, stated, problem = wishes_of(SimpleNamespace(kv_transfer_params={key: {"salt": "tenant"}}))
    assert (read.load, read.save, stated) == (False, False, True)
    assert key in problem
    assert "write 'layercast'" in problem


def test_keys_of_other_connectors_are_none_of_our_business():
    others = {"do_remote_prefill": True, "remote_engine_id": "x", "lmcache.tag": 1, "p2p": 2}
    assert wishes_of(SimpleNamespace(kv_transfer_params=others)) == (Wishes(), False, "")


@pytest.mark.parametrize("landed", [0, 5])
@pytest.mark.parametrize("local", [0, 3, 4])
def test_the_tokens_of_a_receipt_add_up_to_the_prompt(local, landed):
    loaded = SimpleNamespace(
        end=LoadEnd.LANDED, nbytes=1, layers=1, transfer_s=0.0, exposed_s=0.0, verified=True, reason=""
    )
    known = Tracked(asking({}), {}, load=True, save=True, local=local, promised=landed, loaded=loaded)
    told = known.receipt("")
    assert told.computed_tokens + told.held_tokens + told.loaded_tokens == told.prompt_tokens
    assert (told.held_tokens, told.loaded_tokens) == (local, landed)


@pytest.mark.parametrize(("salted", "end"), [(False, "ever saved"), (True, "ever saved under this salt")])
def test_a_miss_under_a_salt_says_that_it_is_the_salts(salted, end):
    known = Tracked(asking({}), {}, load=True, save=True, told=True, miss=MissReason.NEVER_STORED, salted=salted)
    assert known.receipt("").sentence.endswith(end)
    assert known.reply["layercast"]["miss"].endswith(end)


@pytest.mark.parametrize("ends", [*permutations([LoadEnd.LANDED, LoadEnd.LOST, LoadEnd.LANDED])])
def test_a_load_that_has_failed_on_any_rank_is_no_load_in_the_receipt(ends):
    known = Tracked(asking({}), {}, load=True, save=True, promised=8)
    for rank, end in enumerate(ends):
        known.heard(LoadOutcome("load-1", "r", end, 64, 4, False, 0.1, 0.0, f"rank {rank}"))
    receipt = known.receipt("")
    assert (receipt.loaded_tokens, receipt.computed_tokens) == (0, 9)
    assert receipt.detail == f"rank {ends.index(LoadEnd.LOST)}"
    known.heard(LoadOutcome("load-2", "r", LoadEnd.LANDED, 64, 4, False, 0.1, 0.0))
    assert (known.receipt("").loaded_tokens, known.receipt("").detail) == (8, "")
