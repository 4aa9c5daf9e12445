import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_model import FAMILIES, block_by_block, execute, natural, side_of, sides, touched

from layercast.errors import Refused
from layercast.plan.batches import batches_of, windows_of
from layercast.plan.pieces import Pieces, route_between

LAYERS = (0, 1, 2)


@st.composite
def copies(draw):
    kind, shapes = FAMILIES[draw(st.sampled_from(["gqa", "mha", "indexer", "recurrent", "opaque"]))]
    source, target = draw(sides(shapes, kind, LAYERS, 1)), draw(sides(shapes, kind, LAYERS, 2))
    if draw(st.booleans()):
        orders = natural(shapes, cross=True)
        source, target = (side_of(shapes, kind, LAYERS, 9, orders=orders, cross=True, seed=seed) for seed in (1, 2))
    count = draw(st.integers(0, min(source.group.blocks, target.group.blocks)))
    if draw(st.booleans()):
        return source, target, list(range(count)), list(range(target.group.blocks - count, target.group.blocks))
    if draw(st.booleans()):
        return source, target, list(range(count)), list(range(count))[::-1]
    order = draw(st.permutations(range(target.group.blocks)))
    return source, target, list(range(count)), order[:count]


@settings(max_examples=200, deadline=None)
@given(copies(), st.sampled_from([0, 1, 2, 3, 100]), st.sampled_from([0, 1, 7, 48, 97, 192, 1000, 10**6]))
def test_batches_copy_every_byte_of_the_window_once_and_never_exceed_a_limit(case, max_blocks, max_bytes):
    source, target, sources, targets = case
    plan = route_between(source.group, target.group).plan(sources, targets)
    for window in windows_of(LAYERS, 2):
        wanted = block_by_block(source, target, window, list(zip(sources, targets, strict=True)))
        batches = batches_of(plan, window, max_blocks, max_bytes)
        assert all(len(batch) for batch in batches)
        assert all(batch.nbytes <= max_bytes for batch in batches if max_bytes)
        everything = Pieces.join(batches)
        assert touched(everything, len(target.memory)).max(initial=0) <= 1
        assert everything.nbytes == plan.nbytes(window)
        execute(everything, source.memory, target.memory)
        assert np.array_equal(target.memory, wanted)
        if max_blocks:
            most = max_blocks * sum(map(source.group.layer_bytes, window))
            assert all(batch.nbytes <= most for batch in batches)


def block_major(blocks: int):
    kind, shapes = FAMILIES["gqa"]
    return side_of(shapes, kind, LAYERS, blocks, orders=natural(shapes, cross=True), cross=True).group


def plan_of(blocks: int):
    group = block_major(blocks)
    return route_between(group, group).plan(range(blocks), range(blocks)), group.layer_bytes(0)


def test_without_limits_a_window_is_one_batch():
    plan, _ = plan_of(8)
    assert [len(batch) for batch in batches_of(plan, (0, 1))] == [1]


def test_a_block_limit_counts_blocks_not_pieces():
    plan, size = plan_of(8)
    assert [batch.nbytes for batch in batches_of(plan, (1,), max_blocks=3)] == [3 * size, 3 * size, 2 * size]


def test_a_strided_run_is_split_between_rows_before_it_is_split_inside_one():
    plan, size = plan_of(8)
    by_rows = batches_of(plan, (1,), max_bytes=3 * size + 1)
    assert [batch.count.tolist() for batch in by_rows] == [[3], [3], [2]]
    inside = batches_of(plan, (1,), max_bytes=size - 1)
    assert [batch.length.tolist() for batch in inside[:3]] == [[size - 1], [1], [size - 1]]


def test_small_pieces_share_a_batch_up_to_the_limit():
    group = block_major(8)
    plan = route_between(group, group).plan([0, 2, 4, 6], [1, 3, 5, 7])
    size = group.layer_bytes(0)
    assert [len(batch) for batch in batches_of(plan, (0,), max_bytes=2 * size)] == [2, 2]
    assert [len(batch) for batch in batches_of(plan, (0,), max_bytes=3 * size)] == [3, 1]


def test_a_negative_limit_is_refused():
    plan, _ = plan_of(2)
    for limits in [(-1, 0), (0, -1)]:
        with pytest.raises(Refused, match="0 means none"):
            batches_of(plan, (0,), *limits)


@given(st.lists(st.integers(0, 90), unique=True).map(sorted).map(tuple), st.integers(0, 100))
def test_windows_hold_every_layer_once_in_order(layers, size):
    windows = windows_of(layers, size)
    assert tuple(layer for window in windows for layer in window) == layers
    assert all(len(window) <= (size or len(layers)) for window in windows)
    assert len(windows) == (0 if not layers else 1 if not size else -(-len(layers) // size))
