"""Engines that share KV through a folder: real vLLM, one process each, with different hash seeds."""

import pytest


@pytest.fixture(scope="module")
def shared(drive, tmp_path_factory):
    """A producer fills a folder (after the same prompts without a connector), then a consumer answers from it."""
    kv = str(tmp_path_factory.mktemp("kv"))
    producer = drive("folder", "plain", kv, hash_seed=1)
    return {"kv_producer": producer, "kv_consumer": drive("folder", "kv_consumer", kv, hash_seed=2)}


def tokens(facts):
    return [run["replies"][0]["tokens"] for run in facts["runs"]]


def cached(facts):
    return [run["replies"][0]["cached"] for run in facts["runs"]]


def test_both_processes_name_the_same_content_alike_whatever_their_hash_seeds(shared):
    producer, consumer = shared.values()
    assert (producer["seed"], consumer["seed"]) == ("1", "2")
    assert producer["identity"] == consumer["identity"]


def test_answers_are_those_of_an_engine_without_a_connector(shared):
    producer, consumer = shared.values()
    assert tokens(producer) == producer["plain"]
    assert tokens(consumer) == producer["plain"]


def test_a_producer_loads_nothing_and_says_why(shared):
    producer = shared["kv_producer"]
    assert cached(producer) == [0] * 5
    assert "bytes load" not in producer["stats"]
    assert "bytes disk read" not in producer["stats"]
    assert producer["again"]["replies"][0]["cached"] == 0
    assert "kv_producer" in producer["again"]["replies"][0]["params"]["layercast"]["miss"]


def test_a_consumer_saves_nothing_and_loads_all_whole_blocks_but_the_last_tokens(shared):
    consumer = shared["kv_consumer"]
    block = consumer["block"]
    assert cached(consumer) == [(tokens - 1) // block * block for tokens in consumer["prompts"]]
    assert not [name for name in consumer["stats"] if name.startswith(("bytes save", "bytes disk write"))]
    assert all(run["saves"] == [] for run in consumer["runs"])
    assert {end for run in consumer["runs"] for end, *_ in run["loads"]} == {"landed"}


def test_bytes_read_from_the_folder_are_those_of_the_hits_and_the_tier_is_told(shared):
    consumer, producer = shared["kv_consumer"], shared["kv_producer"]
    hits = sum(cached(consumer))
    assert consumer["stats"]["hit_tokens disk"] == hits
    assert consumer["stats"]["bytes disk read"] == hits // consumer["block"] * 65_536
    assert producer["stats"]["bytes disk write"] == producer["stats"]["bytes save"]
    assert [run["replies"][0]["params"]["layercast"]["tier"] for run in consumer["runs"]] == [
        "disk",
        "",
        "",
        "disk",
        "disk",
    ]
    assert [source for source in consumer["sources"] if source] == [
        {"disk": 192},
        {"disk": 32},
        {"disk": 480},
        {"host": 192},
    ]
    again = consumer["again"]["replies"][0]["params"]["layercast"]
    assert (again["tier"], again["loaded_tokens"]) == ("host", 192), "by then it lies in memory"


def test_nothing_is_left(shared):
    for facts in shared.values():
        assert (facts["threads"], facts["descriptors"]) == ([], 0)
        assert facts["drained"]["idle"]
        assert (facts["drained"]["held"], facts["drained"]["requests"]) == (0, 0)
        assert facts["drained"]["free_blocks"] == facts["blocks"]
