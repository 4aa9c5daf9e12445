import json
import os
import subprocess
import sys
from hashlib import sha256
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.errors import NotCacheable
from layercast.spec.keys import Extra, ExtraKind, Identity, block_keys, keys_of, token_bytes

GOLDEN = Path(__file__).with_name("golden_keys.json")
IDENTITY = Identity(
    model="Qwen/Qwen3-0.6B",
    revision="main",
    weights_version="1",
    dtypes=(("key", "bfloat16"), ("value", "bfloat16")),
    layout="token-major",
    group="full",
    block_size=4,
)
SALT, ADAPTER, MEDIA, EMBEDDINGS = ExtraKind.SALT, ExtraKind.ADAPTER, ExtraKind.MEDIA, ExtraKind.EMBEDDINGS


class Case(msgspec.Struct):
    """One line of the fixture; digests are base64."""

    name: str
    identity: Identity
    tokens: list[int]
    extras: dict[int, list[Extra]]
    keys: list[str]


def golden_cases() -> list[Case]:
    return msgspec.json.decode(GOLDEN.read_bytes(), type=list[Case])


def keys_of_cases() -> dict[str, list[str]]:
    return {
        case.name: [key.hex() for key in block_keys(case.identity, case.tokens, case.extras)] for case in golden_cases()
    }


def test_keys_are_the_golden_ones():
    """If this fails, all that was stored under older keys is lost: bump the tag in keys.py, and say so to users."""
    assert keys_of_cases() == {case.name: case.keys for case in golden_cases()}
    assert sum(len(case.keys) for case in golden_cases()) >= 10


@pytest.mark.parametrize("seed", ["1", "2", None])
def test_keys_are_the_golden_ones_in_another_process_under_any_hash_seed(seed):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    program = "import json, test_keys; print(json.dumps(test_keys.keys_of_cases()))"
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == {case.name: case.keys for case in golden_cases()}


def test_the_encoding_is_the_documented_one():
    """Written out by hand: count and lengths as little-endian uint64 before the parts."""

    def u64(number):
        return number.to_bytes(8, "little")

    ids = np.array([5, 6, 7, 2**31 - 1], "<i4").tobytes()
    extra = [b"media", b"\x01\x02", b"-3"]
    coded = u64(3) + b"".join(u64(len(part)) + part for part in extra)
    tagged = u64(1) + u64(len(coded)) + coded
    body = u64(2) + u64(len(ids)) + ids + u64(len(tagged)) + tagged
    wanted = sha256(b"layercast block 1" + IDENTITY.digest() + body).digest()
    assert block_keys(IDENTITY, [5, 6, 7, 2**31 - 1], {0: [Extra(MEDIA, b"\x01\x02", -3)]}) == [wanted]


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8])
def test_only_full_blocks_have_a_key(tokens):
    assert len(block_keys(IDENTITY, list(range(tokens)))) == tokens // 4


tokens_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(tokens_lists, st.integers(0, 10), st.dictionaries(st.integers(0, 9), st.just([Extra(SALT, b"s")])))
def test_a_chain_that_is_continued_equals_one_from_the_start(tokens, known, extras):
    keys = block_keys(IDENTITY, tokens, extras)
    known = min(known, len(keys))
    parent, rest = keys[known - 1] if known else IDENTITY.digest(), tokens[known * 4 : len(keys) * 4]
    assert keys_of(parent, token_bytes(rest), 4, extras, first_block=known) == keys[known:]
    assert block_keys(IDENTITY, np.array(tokens, np.int32), lambda block: extras.get(block, ())) == keys


@given(tokens_lists, tokens_lists)
def test_keys_agree_exactly_as_far_as_the_tokens_do(one, two):
    first, second = block_keys(IDENTITY, one), block_keys(IDENTITY, two)
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        assert (a == b) == (one[: 4 * (index + 1)] == two[: 4 * (index + 1)])


# ---- nothing may imitate anything else ----

names = st.sampled_from(["", "a", "b", "ab", "a\0", "salt", "adapter", "1", "11"])
identities = st.builds(
    Identity,
    model=names,
    revision=names,
    weights_version=names,
    dtypes=st.lists(st.tuples(names, names), max_size=2).map(tuple),
    layout=names,
    group=names,
    block_size=st.sampled_from([1, 2, 11]),
    kv_scales=names,
    draft=names,
)


@given(identities, identities)
def test_identities_have_one_digest_exactly_if_they_are_equal(one, two):
    def canonical(identity):
        return msgspec.structs.replace(identity, dtypes=tuple(sorted(identity.dtypes)))

    assert (one.digest() == two.digest()) == (canonical(one) == canonical(two))
    assert len(one.digest()) == 32


@pytest.mark.parametrize("field", Identity.__struct_fields__)
def test_each_field_alone_changes_every_key_and_is_named(field):
    value = {"block_size": 2, "dtypes": (("key", "float8_e4m3fn"), ("value", "bfloat16"))}.get(field, "other")
    other = msgspec.structs.replace(IDENTITY, **{field: value})
    assert not set(block_keys(IDENTITY, range(8))) & set(block_keys(other, range(8)))
    assert IDENTITY.differences(other) == (field,)
    turned = msgspec.structs.replace(IDENTITY, dtypes=IDENTITY.dtypes[::-1])
    assert IDENTITY.differences(turned) == ()
    assert IDENTITY.digest() == turned.digest()


digests = st.sampled_from([b"a", b"b", b"ab", b"a\0", b"media", b"salt", b"1", b"\x01\0\0\0", b"\x01\0\0\0\0\0\0\0"])
extra_values = st.builds(Extra, st.sampled_from([SALT, ADAPTER, EMBEDDINGS]), digests, st.none()) | st.builds(
    Extra, st.just(MEDIA), digests, st.integers(-2, 12)
)
contents = st.tuples(
    st.lists(st.sampled_from([0, 1, 2, 97]), min_size=4, max_size=8),
    st.dictionaries(st.integers(0, 1), st.lists(extra_values, max_size=3)),
)


@given(contents, contents)
def test_blocks_have_one_key_exactly_if_tokens_and_extras_are_equal(one, two):
    """Salt as adapter, parts whose lengths shift, tokens that move into an extra: all differ."""

    def meaning(content, block):
        tokens, extras = content
        tagged = [
            sorted((e.kind, e.digest, e.offset or 0) for e in extras.get(index, [])) for index in range(block + 1)
        ]
        return tokens[: 4 * (block + 1)], tagged

    keys = [block_keys(IDENTITY, *content) for content in (one, two)]
    for block, (a, b) in enumerate(zip(*keys, strict=False)):
        assert (a == b) == (meaning(one, block) == meaning(two, block))


def test_extras_that_look_alike_make_disjoint_keys():
    tokens = list(range(8))
    sets = [
        set(block_keys(IDENTITY, tokens, {0: extras}))
        for extras in (
            [],
            [Extra(SALT, b"alice")],
            [Extra(ADAPTER, b"alice")],
            [Extra(EMBEDDINGS, b"alice")],
            [Extra(MEDIA, b"alice", 0)],
            [Extra(MEDIA, b"alice", 1)],
            [Extra(SALT, b"ali"), Extra(SALT, b"ce")],
            [Extra(SALT, b"alice"), Extra(SALT, b"alice")],
            [Extra(SALT, b"alice"), Extra(ADAPTER, b"bob")],
            [Extra(SALT, b"bob"), Extra(ADAPTER, b"alice")],
        )
    ]
    assert all(len(keys) == 2 for keys in sets)
    assert not any(one & two for one, two in combinations(sets, 2))


def test_no_extras_in_whatever_form_is_no_extras():
    keys = [block_keys(IDENTITY, range(8), extras) for extras in (None, {}, {0: ()}, {0: []}, lambda block: ())]
    assert all(key == keys[0] for key in keys)


def test_the_order_in_which_extras_are_named_does_not_matter():
    pair = [Extra(SALT, b"s"), Extra(ADAPTER, b"a")]
    assert block_keys(IDENTITY, range(4), {0: pair}) == block_keys(IDENTITY, range(4), {0: pair[::-1]})


def test_a_medium_changes_the_block_it_overlaps_and_those_after_it():
    text, x, y = (
        block_keys(IDENTITY, [9] * 12, extras)
        for extras in ({}, {1: [Extra(MEDIA, b"x", 2)]}, {1: [Extra(MEDIA, b"y", 2)]})
    )
    assert text[0] == x[0] == y[0]
    assert len({text[1], x[1], y[1]}) == len({text[2], x[2], y[2]}) == 3


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (Extra(EMBEDDINGS, b""), "block 1: embeddings without a digest"),
        (Extra(SALT, b""), "block 1: salt without a digest"),
        (Extra(MEDIA, b"x"), "block 1: media need the offset"),
    ],
)
def test_what_can_not_be_named_is_not_cached(extra, says):
    with pytest.raises(NotCacheable, match=says):
        block_keys(IDENTITY, range(8), {1: [extra]})


@pytest.mark.parametrize("token", [-1, -(2**31), 2**31, 2**40, 2**70, 1.0, None, "1", True])
def test_a_token_id_that_is_none_is_refused(token):
    """-1 is what engines write where a token is not known yet."""
    tokens = [token] * 4 if token is True else [1, 2, 3, token]
    with pytest.raises(NotCacheable, match=r"0\.\.2147483647"):
        block_keys(IDENTITY, tokens)


def test_a_parent_that_is_no_key_is_refused():
    with pytest.raises(NotCacheable, match="32 bytes, not 3"):
        keys_of(b"abc", token_bytes([1, 2, 3, 4]), 4)
