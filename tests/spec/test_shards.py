import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.errors import Refused
from layercast.spec.shards import Shard, heads_of, layers_of, shards_of

sizes = st.tuples(st.integers(1, 64), st.integers(1, 32))


@given(sizes)
def test_ranks_hold_every_head_in_order_and_never_none(case):
    heads, size = case
    held = [heads_of(heads, size, rank) for rank in range(size)]
    assert {head for part in held for head in part} == set(range(heads))
    assert all(len(part) >= 1 for part in held)
    assert all(a.start <= b.start <= a.stop for a, b in itertools.pairwise(held))


@given(sizes, st.integers(1, 8))
def test_a_rank_holds_the_heads_that_its_share_of_the_queries_reads(case, queries_per_head):
    """Query heads split evenly, as far as they do; each reads one KV head."""
    heads, size = case
    queries = heads * queries_per_head
    if queries % size == 0:
        share = queries // size
        for rank in range(size):
            read = {query // queries_per_head for query in range(rank * share, (rank + 1) * share)}
            assert read == set(heads_of(heads, size, rank))


@pytest.mark.parametrize(
    ("heads", "size", "held"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (8, 8, [(head, head + 1) for head in range(8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1)] * 3),
        (3, 2, [(0, 2), (1, 3)]),
        (3, 4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
    ],
)
def test_slices_replicas_and_shared_heads(heads, size, held):
    assert [(part.start, part.stop) for part in (heads_of(heads, size, rank) for rank in range(size))] == held


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_eight_heads_halve_until_they_are_replicated(size):
    assert [len(heads_of(8, size, rank)) for rank in range(size)] == [max(1, 8 // size)] * size


@given(st.lists(st.integers(0, 200), unique=True, min_size=1).map(sorted), st.integers(1, 8))
def test_pipeline_stages_hold_every_layer_once_in_model_numbers(layers, size):
    if len(layers) < size:
        with pytest.raises(Refused, match="can't be spread"):
            layers_of(layers, size, 0)
        return
    stages = [layers_of(layers, size, rank) for rank in range(size)]
    assert [layer for stage in stages for layer in stage] == layers
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_shards_are_numbered_stage_by_stage():
    shards = shards_of(4, range(48), 2, 2)
    assert [shard.rank for shard in shards] == [0, 1, 2, 3]
    assert shards[3] == Shard(3, 2, 2, tuple(range(24, 48)))
    assert shards[3].holds(24, 3)
    assert not shards[3].holds(23, 3)
    assert not shards[3].holds(24, 1)


@pytest.mark.parametrize(("heads", "size", "rank"), [(0, 1, 0), (8, 0, 0), (8, 4, 4), (8, 4, -1)])
def test_ranks_and_heads_that_do_not_exist_are_refused(heads, size, rank):
    with pytest.raises(Refused):
        heads_of(heads, size, rank)
