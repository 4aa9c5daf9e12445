"""What besides tokens names KV, in real vLLM: nothing is found under a name that does not say all of its content."""

import pytest

BLOCK, BLOCK_BYTES = 32, 65_536
HIT = [["landed", True, 6 * BLOCK_BYTES, 4, 0]]


@pytest.fixture(scope="module")
def facts(drive):
    return drive("keys")


def cached(run):
    return run["replies"][0]["cached"]


def tokens(run):
    return run["replies"][0]["tokens"]


def told(run):
    return run["replies"][0]["params"]["layercast"]


@pytest.mark.parametrize(("first", "again"), [("salted", "salted_again"), ("own_salt", "own_salt_again")])
def test_a_salt_finds_only_what_it_saved_itself(facts, first, again):
    assert (cached(facts[first]), facts[first]["loads"]) == (0, [])
    assert facts[again]["loads"] == HIT
    assert tokens(facts[again]) == tokens(facts["plain"])


def test_two_salts_share_nothing(facts):
    assert facts["other_salt"]["loads"] == []
    assert facts["other_salt"]["stored"][0] == facts["salted_again"]["stored"][0] + 6


def test_an_adapter_is_named_by_its_files_and_not_by_its_name(facts):
    cold, warm, base = facts["adapter"]
    assert (cold["loads"], warm["loads"], base["loads"]) == ([], HIT, [])
    assert tokens(cold) == tokens(warm) != tokens(base)
    other, other_warm = facts["second"]
    assert (other["loads"], other_warm["loads"]) == ([], HIT)
    assert tokens(other) == tokens(other_warm) != tokens(cold)
    assert facts["renamed"]["loads"] == HIT
    assert tokens(facts["renamed"]) == tokens(cold)


def test_a_request_may_ask_not_to_load_and_not_to_save(facts):
    assert facts["no_load"]["loads"] == []
    assert told(facts["no_load"])["miss"] == "the request asked not to load"
    assert facts["no_save"]["saves"] == []


def test_a_request_that_asks_is_told_what_was_loaded_and_why_not(facts):
    assert told(facts["told"]) == {"loaded_tokens": 6 * BLOCK, "tier": "host", "miss": ""}
    assert told(facts["own_salt"])["miss"] == "no block of this prompt was ever saved under this salt"
    assert facts["plain"]["replies"][0]["params"] is None


def test_a_wish_that_cant_be_read_is_neither_loaded_nor_saved(facts):
    assert (facts["unknown_wish"]["loads"], facts["unknown_wish"]["saves"]) == ([], [])


def test_a_request_that_must_not_read_the_prefix_cache_does_not_load(facts):
    assert (cached(facts["prompt_logprobs"]), facts["prompt_logprobs"]["loads"]) == (0, [])


def test_what_vllm_holds_itself_is_not_loaded(facts):
    first, again = facts["local_longer"]
    assert (cached(again), again["loads"]) == (6 * BLOCK, [])
    assert tokens(first) == tokens(again)


def test_the_pool_goes_on_where_vllm_s_own_prefix_ends(facts):
    _, longer = facts["local_shorter"]
    assert cached(longer) == 6 * BLOCK
    assert longer["loads"] == [["landed", True, 4 * BLOCK_BYTES, 4, 0]]
    assert tokens(longer) == tokens(facts["plain"])


def test_a_reset_pool_finds_nothing_of_before_and_then_works_on(facts):
    assert facts["reset"] is True
    assert facts["after_reset"]["loads"] == []
    assert facts["after_reset_again"]["loads"] == HIT


def metric(facts, name, **labels):
    found = [
        value
        for key, has, value in facts["metrics"]
        if key == f"vllm:layercast_{name}" and labels.items() <= has.items()
    ]
    assert len(found) == 1, (name, labels, facts["metrics"])
    return found[0]


def test_what_was_moved_and_missed_is_counted_in_vllm_s_metrics(facts):
    runs = [value for value in facts.values() if isinstance(value, dict) and "loads" in value]
    runs = [*runs, *facts["local_longer"], *facts["local_shorter"]]
    runs = [run for run in runs if run is not facts["renamed"]]
    loads = [load for run in runs for load in run["loads"]]
    assert metric(facts, "bytes", direction="load") == sum(nbytes for _, _, nbytes, *_ in loads)
    assert metric(facts, "transfers", outcome="load landed") == len(loads)
    assert metric(facts, "hit_tokens", tier="host") * BLOCK_BYTES == BLOCK * metric(facts, "bytes", direction="load")
    assert metric(facts, "hits", mode="layerwise") == len(loads)
    assert metric(facts, "pieces", direction="load") >= metric(facts, "layers", direction="load")
    assert metric(facts, "staging_bytes", rank="0") == 0
    assert metric(facts, "misses", reason="never_stored") >= 3
    assert metric(facts, "misses", reason="declined") >= 2


def test_what_becomes_visible_in_the_pool_and_what_is_dropped_are_vllm_s_kv_events(facts):
    (stored,) = facts["events"]
    assert stored == ["BlockStored", facts["keys"], None, facts["long"][: 6 * BLOCK], BLOCK, 0]
    heard, there = facts["before_reset"]
    assert heard == there
    assert len(there) > 6


def test_after_a_reset_nobody_is_told_of_what_is_found_no_more(facts):
    heard, keys = facts["after_all"]
    assert sorted(keys) == heard


def test_every_request_leaves_a_receipt_in_the_log(facts):
    assert any("192 loaded from host, layerwise (393,216 bytes, 4 layers" in line for line in facts["receipts"])
    assert any("nothing loaded: the request asked not to load" in line for line in facts["receipts"])
    assert any("192 held by vLLM itself, nothing loaded: the engine itself still" in line for line in facts["receipts"])
    assert any("64 held by vLLM itself, 128 loaded from host" in line for line in facts["receipts"])
    assert len(facts["receipts"]) >= 17


def test_the_receipt_of_a_single_token_says_what_became_of_its_load(facts):
    assert facts["single"]["loads"] == HIT
    assert "192 loaded from host, layerwise (393,216 bytes, 4 layers" in facts["last_receipt"]


def test_a_cache_of_eight_bits_is_loaded_byte_by_byte_and_each_kind_has_its_own_names(facts):
    if not facts["small"]:
        pytest.skip("vLLM keeps eight bits only on processors with AVX-512 or AMX")
    nbytes = 6 * BLOCK_BYTES // 4
    keys = {facts["keys"][0]}
    for equal, loads, moved, key, threads in facts["small"]:
        assert (equal, loads, moved, threads) == (True, [["landed", True, nbytes, 4, 0]], nbytes, [])
        keys.add(key)
    assert len(keys) == 3


def test_nothing_is_left(facts):
    assert facts["drained"] == facts["lora_drained"]
    assert facts["drained"]["idle"]
    assert (facts["drained"]["held"], facts["drained"]["requests"]) == (0, 0)
    assert facts["threads"] == facts["lora_threads"] == []
