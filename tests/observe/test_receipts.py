import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.observe.receipts import MissReason, Receipt, overlap, receipts_in, total

HIT = Receipt(
    request="r1",
    prompt_tokens=1024,
    computed_tokens=64,
    loaded_tokens=960,
    nbytes=22_118_400,
    layers=30,
    layout="per layer",
    tier="slab",
    window=1,
    transfer_s=0.2,
    exposed_s=0.05,
    verified=True,
)


def test_overlap_is_the_part_of_the_transfer_that_nobody_waited_for():
    assert HIT.overlap == pytest.approx(0.75)


def test_overlap_of_a_transfer_that_took_no_time_is_unknown():
    assert overlap(0.0, 0.0) is None


def test_a_wait_that_nobody_saw_is_no_overlap_in_number_sentence_or_sum():
    unseen = msgspec.structs.replace(HIT, exposed_s=None)
    assert unseen.overlap is None
    assert "not known how much hidden behind compute" in unseen.sentence
    assert "%" not in unseen.sentence
    assert msgspec.json.decode(msgspec.json.encode(unseen), type=Receipt) == unseen
    assert total([0.5, None]) is None
    assert total([0.5, 0.25]) == 0.75


@given(st.floats(1e-9, 1e3), st.floats(0, 1e6))
def test_overlap_lies_between_0_and_1(transfer, exposed):
    assert 0.0 <= overlap(transfer, exposed) <= 1.0


def test_a_receipt_is_frozen_and_survives_json():
    with pytest.raises(AttributeError):
        HIT.layers = 3
    assert msgspec.json.decode(msgspec.json.encode(HIT), type=Receipt) == HIT


def test_the_sentence_of_a_hit_says_bytes_layers_overlap_and_check():
    assert HIT.sentence == (
        "r1: 1024 prompt tokens, 64 computed, 960 loaded from slab (22,118,400 bytes, 30 layers, "
        "75% hidden behind compute, verified)"
    )


def test_what_vllm_held_itself_is_told_so_that_the_tokens_add_up():
    held = msgspec.structs.replace(HIT, computed_tokens=24, held_tokens=128, loaded_tokens=872)
    assert "1024 prompt tokens, 24 computed, 128 held by vLLM itself, 872 loaded" in held.sentence
    missed = msgspec.structs.replace(held, held_tokens=1000, loaded_tokens=0, miss=MissReason.NEVER_UNDER_SALT)
    assert "24 computed, 1000 held by vLLM itself, nothing loaded: no block" in missed.sentence
    assert missed.sentence.endswith("under this salt")


@pytest.mark.parametrize("reason", MissReason)
def test_the_sentence_of_a_miss_says_why(reason):
    miss = Receipt(request="r2", prompt_tokens=10, computed_tokens=10, miss=reason, detail="layer 7")
    assert miss.sentence == f"r2: 10 prompt tokens, 10 computed, nothing loaded: {reason.value} (layer 7)"


def test_receipts_are_found_in_a_log_by_how_the_request_begins():
    receipts = [Receipt(request=f"cmpl-{number}", prompt_tokens=9, computed_tokens=9) for number in (1, 2, 12)]
    lines = [f"INFO 11-27 layercast: receipt {msgspec.json.encode(receipt).decode()}\n" for receipt in receipts]
    noise = ["receipt {not json}\n", "receipt {}\n", "a receipt\n"]
    assert receipts_in([*noise, *lines], "cmpl-1") == [receipts[0], receipts[2]]
    assert receipts_in([*noise, *lines], "cmpl-2") == [receipts[1]]
    assert receipts_in(noise, "") == []
