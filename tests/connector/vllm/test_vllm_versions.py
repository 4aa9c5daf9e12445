"""What older versions of vLLM tell otherwise, from values in their shapes."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch

from layercast.connector.vllm import versions


def step(new=(), cached=(), resumed=(), finished=()):
    """A scheduler's output. new: (name, blocks); cached: (name, added blocks or None)."""
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(list(blocks),)) for name, blocks in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached],
            new_block_ids=[None if added is None else (list(added),) for _, added in cached],
            resumed_req_ids=set(resumed),
        ),
    )


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr(versions, "TELLS_TABLES", False)
    return versions.Tables()


def test_tables_are_followed_where_no_step_tells_them(tables):
    tables.step(step(new=[("a", [1, 2]), ("b", [3])]))
    tables.step(step(cached=[("a", [4]), ("b", None)]))
    assert tables.of("a") == [[1, 2, 4]]
    assert tables.of("b") == [[3]]
    assert list(tables.snapshots("a")) == []


def test_a_resumed_request_s_table_begins_anew(tables):
    tables.step(step(new=[("a", [1, 2])]))
    tables.step(step(cached=[("a", [7])], resumed=["a"]))
    assert tables.of("a") == [[7]]
    tables.step(step(new=[("a", [9, 8])]))
    assert tables.of("a") == [[9, 8]]


def test_an_ended_request_has_no_table(tables):
    tables.step(step(new=[("a", [1])]))
    tables.step(step(finished=["a"]))
    with pytest.raises(KeyError):
        tables.of("a")


@pytest.mark.parametrize("tells", [True, False])
def test_extras_are_tagged_whether_vllm_does_it_or_not(monkeypatch, tells):
    """Older versions list them bare: adapter, media, salt."""
    bare = ["adapter", ("picture", 3), "tenant"]
    tagged = [("lora", "adapter"), ("mm", "picture", 3), ("cache_salt", "tenant")]
    monkeypatch.setattr(versions, "TAGS_EXTRAS", tells)
    monkeypatch.setattr(versions, "generate_block_hash_extra_keys", lambda *_: (tagged if tells else bare, 1))
    request = SimpleNamespace(lora_request=object(), cache_salt="tenant")
    assert versions.extra_keys(request, 0, 16, 0) == (tagged, 1)


@pytest.mark.parametrize("order", [(1, 0, 3, 2, 4), (1, 2, 0, 3, 4)])
def test_one_tensor_of_all_layers_becomes_a_view_for_each(order):
    logical = torch.arange(3 * 5 * 2 * 4 * 6).reshape(3, 5, 2, 4, 6)
    physical = logical.permute(*order).contiguous()
    backend = SimpleNamespace(get_kv_cache_stride_order=lambda include_num_layers_dimension: order)
    caches = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(shared_by=[f"layer.{i}"]) for i in range(3)])
    views = versions.by_layer(caches, physical, backend)
    assert list(views) == ["layer.0", "layer.1", "layer.2"]
    for index, view in enumerate(views.values()):
        assert torch.equal(view, logical[index])
        assert view.untyped_storage().data_ptr() == physical.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("second", "stride", "wanted", "found"),
    [
        (False, True, True, "BNHD"),
        (True, True, True, "NHD"),
        (False, False, True, "NHD"),
        (False, True, False, "NHD"),
    ],
)
def test_blocks_of_all_layers_are_claimed_only_where_an_older_version_grants_them(
    monkeypatch, second, stride, wanted, found
):
    monkeypatch.setattr(versions, "NAMES_LAYOUTS", False)
    monkeypatch.setattr(versions, "layout_name", lambda *_: "NHD")
    spec = SimpleNamespace(indexes_kv_by_block_stride=stride)
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    assert versions.layout_in_force(SimpleNamespace(use_v2_model_runner=second), caches, wanted) == found


@pytest.mark.parametrize(
    ("algorithm", "groups", "caches", "tokens"),
    [
        ("sha256", 1, {}, 16),
        ("sha256_cbor", 2, {"hash_block_size": 8}, 8),
        ("sha256", 2, {}, 0),
        ("sha256", 2, {"hash_block_size": None}, 0),
        ("xxhash", 1, {"hash_block_size": 16}, 0),
    ],
)
def test_only_digests_that_nobody_can_make_alike_and_of_known_ends_are_relied_on(algorithm, groups, caches, tokens):
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm, block_size=16))
    assert versions.digested(config, SimpleNamespace(kv_cache_groups=[None] * groups, **caches)) == tokens
