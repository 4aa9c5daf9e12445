"""What a request may ask of the pool, and what becomes of a wish that can't be read."""

from types import SimpleNamespace

import pytest

from layercast.connector.vllm.tracked import Tracked, Wishes, wishes_of
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
    assert known.receipt.detail == problem
    assert problem
