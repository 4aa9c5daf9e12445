"""Names of blocks, hashed late and once, against hashing all of them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from layercast.control import names
from layercast.control.names import Digested, Names, presence
from layercast.errors import NotCacheable
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.spec.identities import identities_of
from layercast.spec.keys import Extra, ExtraKind, block_keys, extras_for, keys_of, token_bytes
from layercast.testing.oracle import ByteEngine

SPECS = (
    GroupSpec("full", GroupKind.FULL, 2, (0,)),
    GroupSpec("window", GroupKind.WINDOW, 4, (1,), 8),
)
IDENTITIES = identities_of(ByteEngine(SPECS, 2).layout, model="m")
PROMPT = list(range(40))
SALT = {0: [Extra(ExtraKind.SALT, b"tenant")]}

prompts = st.lists(st.integers(0, 1), max_size=40)


@given(st.lists(st.tuples(prompts, st.booleans(), st.integers(0, 25)), max_size=8))
def test_what_was_said_before_has_the_name_that_hashing_gives(asked):
    """Prompts of two letters share beginnings of any length; some have a salt, and not all is asked for at once."""
    naming = Names(SPECS[:1], IDENTITIES[:1])
    for nth, (tokens, salted, at_first) in enumerate(asked):
        extras = SALT if salted else None
        (chain,) = naming.of(str(nth), tokens, len(tokens), extras)
        chain.upto(min(at_first, len(chain)))
        assert list(chain) == block_keys(IDENTITIES[0], tokens, extras)


def digested(tokens, size):
    """The tokens with digests as an engine makes them: another for each prefix, of all that it has by now."""
    return Digested(
        tokens, [repr(tokens[: end + size]).encode() for end in range(0, len(tokens) - size + 1, size)], size
    )


asked = st.tuples(prompts, st.sampled_from(["plain", "salted", "digested", "digested finer"]), st.integers(0, 25))


@given(st.lists(st.one_of(asked, st.just("renew")), max_size=10), st.integers(8, 40))
def test_what_digests_find_has_the_name_that_hashing_gives(steps, most):
    """In groups whose blocks are as large as what has a digest, larger, or not told by digests at all."""
    sizes, naming = [spec.block_size for spec in SPECS], Names(SPECS, IDENTITIES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(names, "MOST_SAID", most)
        for nth, step in enumerate(steps):
            if step == "renew":
                naming.renew()
                continue
            tokens, how, at_first = step
            told = digested(tokens, 1 if "finer" in how else 2) if "digested" in how else tokens
            extras = SALT if how == "salted" else None
            chains = naming.of(str(nth), told, len(tokens), extras)
            for chain, identity, size in zip(chains, naming._identities, sizes, strict=True):
                chain.upto(min(at_first, len(chain)))
                assert list(chain) == keys_of(
                    identity.digest(), token_bytes(tokens[: len(chain) * size]), size, extras_for(extras, 2, size)
                )


def test_no_token_is_looked_at_where_digests_tell_all_of_it(monkeypatch):
    naming, told = Names(SPECS, IDENTITIES), digested(PROMPT, 2)
    first = [list(chain) for chain in naming.of("first", told, 40)]
    monkeypatch.setattr(names, "token_bytes", None)
    assert [list(chain) for chain in naming.of("again", told, 40)] == first


@pytest.mark.parametrize(("size", "digests"), [(3, 13), (2, 19)], ids=["of other blocks", "too few"])
def test_digests_that_do_not_tell_every_block_are_not_asked(size, digests):
    naming = Names(SPECS[:1], IDENTITIES[:1])
    for tokens in (PROMPT, PROMPT[::-1]):
        (chain,) = naming.of(None, Digested(tokens, [b"the same"] * digests, size), 40)
        assert list(chain) == block_keys(IDENTITIES[0], tokens)


def test_no_prompt_is_hashed_twice(monkeypatch):
    naming = Names(SPECS, IDENTITIES)
    first = [list(chain) for chain in naming.of("first", PROMPT, 40)]
    monkeypatch.setattr(names, "keys_of", None)
    assert [list(chain) for chain in naming.of(None, PROMPT, 40)] == first


def test_what_is_said_is_forgotten_beyond_a_number_of_blocks_and_when_names_change(monkeypatch):
    monkeypatch.setattr(names, "MOST_SAID", 50)
    naming = Names(SPECS[:1], IDENTITIES[:1])
    for nth in range(10):
        (chain,) = naming.of(None, [nth, *PROMPT], 41)
        chain.upto(1)
        assert len(list(chain)) == 20
    assert [len(run.keys) for run in naming._said._runs.values()] == [19, 19]
    assert naming._said._blocks == 2 * 19
    naming.renew()
    assert not naming._said._runs
    assert list(naming.of(None, PROMPT, 40)[0]) != block_keys(IDENTITIES[0], PROMPT)


def test_a_request_that_goes_on_is_hashed_from_where_it_was():
    naming, tokens = Names(SPECS[:1], IDENTITIES[:1]), PROMPT[:10]
    (chain,) = naming.of("r", tokens, 10)
    tokens += PROMPT[10:]
    assert len(chain) == len(chain.upto(5)) == 5
    assert list(naming.of("r", tokens, 40)[0]) == block_keys(IDENTITIES[0], PROMPT)
    naming.forget("r")
    assert len(naming) == 0


def test_a_look_up_hashes_no_key_behind_the_first_absent_one_but_for_what_comes_in_a_go():
    chains = Names(SPECS, IDENTITIES).of(None, PROMPT, 40)
    assert presence(SPECS, chains, [lambda key: False] * 2, 0) == [[], []]
    assert [len(chain.known) for chain in chains] == [1, 0]
    there = set(block_keys(IDENTITIES[0], PROMPT)[:7])
    assert presence(SPECS, chains, [there.__contains__, lambda key: True], 0) == [[True] * 7, [True] * 3]
    assert [len(chain.known) for chain in chains] == [16, 3]


def test_a_look_up_hashes_one_key_behind_what_was_remembered_and_is_there():
    names = Names(SPECS[:1], IDENTITIES[:1])
    (told,) = names.of(None, PROMPT[:20], 20)
    told.upto(10)
    (chain,) = names.of(None, PROMPT, 40)
    assert chain.until(set(told.known).__contains__) == 10
    assert len(chain.known) == 11


def test_what_the_engine_holds_itself_is_found_in_what_was_remembered(monkeypatch):
    """Another prompt was looked up in vain, and then named whole: its keys are remembered from the second one on."""
    naming = Names(SPECS[:1], IDENTITIES[:1])
    (told,) = naming.of(None, PROMPT[:34], 34)
    assert told.until(lambda key: False) == 0
    keys, hashed = list(told), []
    monkeypatch.setattr(names, "keys_of", lambda parent, ids, *rest: hashed.append(ids) or keys_of(parent, ids, *rest))
    (chain,) = naming.of(None, [*PROMPT[:32], *PROMPT], 72)
    assert chain.until(keys[:16].__contains__, 16) == 16
    assert chain.known[:16] == keys[:16]
    assert sum(len(ids) for ids in hashed) == 2 * 4 * 2, "the first block and the one behind what is held"


def test_what_was_named_behind_an_earlier_prompt_is_found_again_from_the_first_block_on(monkeypatch):
    """A chat goes on while the engine holds it, so its turns are remembered one by one; then nobody has it any more."""
    naming, turns = Names(SPECS[:1], IDENTITIES[:1]), (20, 40, 60)
    prompt = list(range(2 * turns[-1]))
    for held, blocks in zip((0, *turns), turns, strict=False):
        (chain,) = naming.of(None, prompt[: 2 * blocks], 2 * blocks)
        chain.until(lambda key: False, held)
        keys, hashed = list(chain), []
    monkeypatch.setattr(names, "keys_of", lambda parent, ids, *rest: hashed.append(ids) or keys_of(parent, ids, *rest))
    (chain,) = naming.of(None, prompt, len(prompt))
    assert chain.until(lambda key: False) == 0
    assert list(chain) == keys
    assert sum(len(ids) for ids in hashed) == len(turns) * 4 * 2, "one block a turn"


@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.builds(slice, *[st.none() | st.integers(-15, 15)] * 2, st.none() | st.integers(-4, 4).filter(bool)),
)
@example(4, 2, slice(-3, 1))
def test_a_part_of_a_chain_is_that_part_of_all_its_keys_however_many_are_hashed(blocks, known, part):
    (chain,) = Names(SPECS[:1], IDENTITIES[:1]).of(None, PROMPT, 2 * blocks)
    chain.upto(min(known, blocks))
    assert chain[part] == block_keys(IDENTITIES[0], PROMPT[: 2 * blocks])[part]


@pytest.mark.parametrize("held", [0, 1, 5, 16, 40])
def test_of_a_prompt_that_nobody_has_named_one_key_is_hashed_behind_what_the_engine_holds(held):
    (chain,) = Names(SPECS[:1], IDENTITIES[:1]).of(None, [*PROMPT, *PROMPT], 80)
    assert chain.until(lambda key: False, held) == held
    assert len(chain.known) == (held + 1 if held < len(chain) else 0)


@given(prompts, st.lists(st.integers(0, 19)), st.lists(st.integers(0, 19)), st.integers(0, 40))
def test_what_is_coming_is_the_same_where_it_is_known_what_is_there(tokens, stored, saving, local):
    """Also where blocks in the middle are gone, of either group, and with any number of tokens in the engine."""
    chains = Names(SPECS, IDENTITIES).of(None, tokens, len(tokens))
    now, soon = ([{chain[i] for i in some if i < len(chain)} for chain in chains] for some in (stored, stored + saving))
    there = presence(SPECS, chains, [one.__contains__ for one in now], local)
    has = [one.__contains__ for one in soon]
    assert presence(SPECS, chains, has, local, there) == presence(SPECS, chains, has, local)


def test_what_cant_be_named_is_an_error_when_it_is_asked_for():
    (chain,) = Names(SPECS[:1], IDENTITIES[:1]).of("r", [1, 2, 3, -1], 4)
    assert len(chain.upto(1)) == 1
    with pytest.raises(NotCacheable):
        chain.upto(2)
