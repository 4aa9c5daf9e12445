"""Extras of a request, as vLLM's own function finds them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from layercast.connector.vllm.extras import Adapters, extras_of
from layercast.errors import NotCacheable
from layercast.spec.keys import Extra, ExtraKind


def request(**changes):
    facts = {
        "request_id": "r",
        "num_prompt_tokens": 64,
        "prompt_embeds": None,
        "resumable": False,
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
    }
    return SimpleNamespace(**{**facts, **changes})


def medium(identifier, offset, length):
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_a_bare_prompt_has_no_extras():
    assert extras_of(request(), Adapters(), 16) == {}


def test_a_medium_is_named_in_every_block_that_it_touches_with_its_place_there():
    found = extras_of(request(mm_features=[medium("cat", 10, 20), medium("dog", 50, 4)]), Adapters(), 16)
    assert found == {
        0: [Extra(ExtraKind.MEDIA, b"cat", 10)],
        1: [Extra(ExtraKind.MEDIA, b"cat", -6)],
        3: [Extra(ExtraKind.MEDIA, b"dog", 2)],
    }


def test_the_salts_of_vllm_and_of_a_request_are_two():
    ours = extras_of(request(), Adapters(), 16, salt="a")
    theirs = extras_of(request(cache_salt="a"), Adapters(), 16)
    assert ours.keys() == theirs.keys() == {0}
    assert ours != theirs


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_embeds": object()},
        {"resumable": True},
        {"lora_request": SimpleNamespace(lora_name="x", lora_path="somewhere/else", load_inplace=False)},
        {"lora_request": SimpleNamespace(lora_name="x", lora_path="", load_inplace=False)},
    ],
)
def test_what_has_no_digest_is_not_cacheable(changes):
    with pytest.raises(NotCacheable):
        extras_of(request(**changes), Adapters(), 16)


def test_an_adapter_s_digest_follows_its_files_if_it_is_loaded_anew(tmp_path):
    """Under the number that it had, vLLM goes on with the weights that it has loaded."""

    def lora(number):
        return SimpleNamespace(lora_name="x", lora_int_id=number, lora_path=str(tmp_path), load_inplace=False)

    adapters = Adapters()
    (tmp_path / "weights").write_bytes(b"one")
    first = adapters.digest(lora(1))
    assert adapters.digest(lora(1)) == first
    (tmp_path / "weights").write_bytes(b"other")
    with pytest.raises(NotCacheable, match="have changed"):
        adapters.digest(lora(1))
    assert adapters.digest(lora(2)) != first
