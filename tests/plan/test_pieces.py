from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_model import FAMILIES, block_by_block, execute, natural, side_of, sides, touched

from layercast.errors import BadBlocks, LayoutMismatch
from layercast.plan.columns import columns_of, merged_columns
from layercast.plan.pieces import COLUMNS, Pieces, route_between
from layercast.spec.groups import packed_like

LAYERS = (0, 3, 4)


@st.composite
def copies(draw):
    """Two sides of one family in unrelated layouts, and pairs of blocks."""
    kind, shapes = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    source, target = draw(sides(shapes, kind, LAYERS, 1)), draw(sides(shapes, kind, LAYERS, 2))
    targets = draw(st.lists(st.integers(0, target.group.blocks - 1), unique=True))
    sources = draw(st.lists(st.integers(0, source.group.blocks - 1), min_size=len(targets), max_size=len(targets)))
    return source, target, sources, targets


@settings(max_examples=150, deadline=None)
@given(copies(), st.lists(st.sampled_from(LAYERS), unique=True))
def test_pieces_of_a_window_copy_what_copying_block_by_block_copies(case, window):
    source, target, sources, targets = case
    plan = route_between(source.group, target.group).plan(sources, targets)
    wanted = block_by_block(source, target, window, list(zip(sources, targets, strict=True)))
    pieces = plan.window(window)
    assert touched(pieces, len(target.memory)).max(initial=0) <= 1
    execute(pieces, source.memory, target.memory)
    assert np.array_equal(target.memory, wanted)
    assert pieces.nbytes == plan.nbytes(window) == len(targets) * sum(map(source.group.layer_bytes, window))


@settings(max_examples=60, deadline=None)
@given(copies())
def test_layers_one_by_one_copy_what_one_window_copies(case):
    source, target, sources, targets = case
    plan = route_between(source.group, target.group).plan(sources, targets)
    bulk = target.memory.copy()
    execute(plan.window(plan.layers), source.memory, bulk)
    execute(Pieces.join([plan.layer(layer) for layer in plan.layers]), source.memory, target.memory)
    assert np.array_equal(target.memory, bulk)


@settings(max_examples=60, deadline=None)
@given(copies(), st.integers(1, 4))
def test_parts_of_a_plan_are_together_the_plan(case, size):
    source, target, sources, targets = case
    plan = route_between(source.group, target.group).plan(sources, targets)
    parts = [plan.part(first, first + size) for first in range(0, plan.blocks, size)]
    assert all(1 <= part.blocks <= size for part in parts)
    pairs = [pair for part in parts for pair in zip(*(ids.tolist() for ids in part.pairs()), strict=True)]
    assert sorted(pairs) == sorted(zip(sources, targets, strict=True))
    assert pairs == list(zip(*(ids.tolist() for ids in plan.pairs()), strict=True))


@settings(max_examples=60, deadline=None)
@given(copies(), st.integers(1, 4))
def test_windows_that_share_their_arrays_are_what_each_would_be_by_itself(case, size):
    source, target, sources, targets = case
    plan = route_between(source.group, target.group).plan(sources, targets)
    windows = [LAYERS[at : at + size] for at in range(0, len(LAYERS), size)]
    again = route_between(source.group, target.group)
    for window in windows:
        found, wanted = plan.window(window), replace(again, shifts={}).plan(sources, targets).window(window)
        assert all(np.array_equal(getattr(found, name), getattr(wanted, name)) for name in COLUMNS)


@settings(max_examples=60, deadline=None)
@given(copies(), st.integers(1, 4))
def test_the_parts_of_a_plans_series_are_its_windows_each_once(case, size):
    source, target, sources, targets = case
    plan = route_between(source.group, target.group).plan(sources, targets)
    windows = tuple(tuple(LAYERS[at : at + size]) for at in range(0, len(LAYERS), size))
    found = {}
    for alike, series, nbytes in plan.series((*windows, (max(LAYERS) + 1,))):
        assert list(series.turns) == sorted(window[0] for window in alike.windows)
        assert series.size == tuple(map(sum, zip(*(part.size for part in series), strict=True)))
        assert series.size[0] == nbytes
        found.update(zip(alike.windows, series, strict=True))
    assert sorted(found) == list(windows)
    for window, part in found.items():
        assert all(np.array_equal(getattr(part, name), getattr(plan.window(window), name)) for name in COLUMNS)


def test_layers_that_are_alike_but_for_where_they_lie_are_known_to_be():
    engine = block_major(4, 8, 0)
    shifts = route_between(engine.group, engine.group).shifts
    step = engine.group.layer_bytes(0)
    assert shifts == {layer: (layer * step, layer * step) for layer in range(4)}


@settings(max_examples=60, deadline=None)
@given(copies(), st.randoms())
def test_the_order_of_the_pairs_does_not_matter(case, random):
    source, target, sources, targets = case
    pairs = list(zip(sources, targets, strict=True))
    random.shuffle(pairs)
    route = route_between(source.group, target.group)
    one = target.memory.copy()
    execute(route.plan(sources, targets).window(LAYERS), source.memory, one)
    execute(route.plan([a for a, _ in pairs], [b for _, b in pairs]).window(LAYERS), source.memory, target.memory)
    assert np.array_equal(target.memory, one)


def hashed(ranges, memory) -> list[bytes]:
    return [
        b"".join(memory[at : at + length].tobytes() for at, length in zip(row, ranges.length, strict=True))
        for row in ranges.address
    ]


@settings(max_examples=60, deadline=None)
@given(copies())
def test_a_block_hashes_alike_where_it_is_saved_and_where_it_lands(case):
    """Engine to slab, slab to another engine: four reads, one byte string a block."""
    engine, other, blocks, landed = case
    slots = list(range(len(blocks)))
    bases, at = {}, 0
    for layer in LAYERS:
        bases[layer] = at
        at += max(1, len(slots)) * engine.group.layer_bytes(layer)
    slab, memory = packed_like(engine.group, bases, max(1, len(slots))), np.zeros(at, np.uint8)
    save = route_between(engine.group, slab).plan(blocks, slots)
    load = route_between(slab, other.group).plan(slots, landed)
    execute(save.window(LAYERS), engine.memory, memory)
    execute(load.window(LAYERS), memory, other.memory)
    saved, loaded = save.pairs()[1].tolist(), load.pairs()[0].tolist()
    for layer in LAYERS:
        readings = [
            (saved, save.digest_ranges(layer, read="source", order="target"), engine.memory),
            (saved, save.digest_ranges(layer, read="target", order="target"), memory),
            (loaded, load.digest_ranges(layer, read="source", order="source"), memory),
            (loaded, load.digest_ranges(layer, read="target", order="source"), other.memory),
        ]
        first, *rest = [dict(zip(ids, hashed(ranges, held), strict=True)) for ids, ranges, held in readings]
        assert all(reading == first for reading in rest)
        assert all(len(row) == engine.group.layer_bytes(layer) for row in first.values())


def block_major(layers: int, blocks: int, seed: int):
    kind, shapes = FAMILIES["gqa"]
    return side_of(shapes, kind, range(layers), blocks, orders=natural(shapes, cross=True), cross=True, seed=seed)


def test_contiguous_block_major_blocks_are_one_piece_in_bulk_and_strided_pieces_in_windows():
    source, target = block_major(28, 70, 1), block_major(28, 80, 2)
    plan = route_between(source.group, target.group).plan(range(5, 68), range(10, 73))
    assert len(plan.window(plan.layers)) == 1
    for size in (1, 2, 4, 7, 14):
        windows = [plan.window(plan.layers[first : first + size]) for first in range(0, 28, size)]
        assert [len(pieces) for pieces in windows] == [1] * (28 // size)
        assert all(pieces.count.tolist() == [63] for pieces in windows)
        assert sum(pieces.nbytes for pieces in windows) == plan.window(plan.layers).nbytes


def test_contiguous_blocks_of_a_layer_are_one_piece_for_each_plane():
    kind, shapes = FAMILIES["mha"]
    source, target = (
        side_of(shapes, kind, LAYERS, 9, orders=natural(shapes, cross=False), cross=False, seed=seed) for seed in (1, 2)
    )
    plan = route_between(source.group, target.group).plan(range(9), range(9))
    assert [len(plan.layer(layer)) for layer in LAYERS] == [2, 2, 2]


def test_blocks_descending_on_both_sides_are_one_long_piece():
    source, target = block_major(2, 9, 1), block_major(2, 9, 2)
    plan = route_between(source.group, target.group).plan([5, 4, 3], [8, 7, 6])
    assert plan.window(plan.layers).count.tolist() == [1]


@pytest.mark.parametrize(("sources", "targets"), [([3, 4, 5], [8, 7, 6]), ([5, 4, 3], [6, 7, 8])])
def test_blocks_descending_on_one_side_are_one_strided_run(sources, targets):
    source, target = block_major(2, 9, 1), block_major(2, 9, 2)
    plan = route_between(source.group, target.group).plan(sources, targets)
    for layers in ((0,), (0, 1)):
        wanted = block_by_block(source, target, layers, list(zip(sources, targets, strict=True)))
        pieces = plan.window(layers)
        assert pieces.count.tolist() == [3]
        assert pieces.target_stride.tolist() == [-2 * source.group.layer_bytes(0)]
        execute(pieces, source.memory, target.memory)
        assert np.array_equal(target.memory, wanted)


def runs_of(length: int):
    """Ids as allocators leave them: stretches up, stretches down, single ones."""
    stretch = st.tuples(st.integers(0, length - 1), st.integers(1, 5), st.sampled_from([1, -1]))
    return st.lists(stretch, min_size=1, max_size=6).map(
        lambda stretches: list(
            dict.fromkeys(
                at
                for first, count, step in stretches
                for at in range(first, first + count * step, step)
                if 0 <= at < length
            )
        )
    )


@settings(max_examples=150, deadline=None)
@given(runs_of(20), runs_of(20), st.booleans(), st.sampled_from([(0,), (1,), (0, 1)]))
def test_runs_up_and_down_copy_what_copying_block_by_block_copies(sources, targets, cross, layers):
    kind, shapes = FAMILIES["mha"]
    orders = natural(shapes, cross=cross)
    source, target = (side_of(shapes, kind, (0, 1), 20, orders=orders, cross=cross, seed=seed) for seed in (1, 2))
    count = min(len(sources), len(targets))
    pairs = list(zip(sources[:count], targets[:count], strict=True))
    plan = route_between(source.group, target.group).plan(*zip(*pairs, strict=True))
    assert sorted(zip(*(ids.tolist() for ids in plan.pairs()), strict=True)) == sorted(pairs)
    wanted = block_by_block(source, target, layers, pairs)
    execute(plan.window(layers), source.memory, target.memory)
    assert np.array_equal(target.memory, wanted)


def test_no_blocks_and_no_layers_are_no_pieces():
    source, target = block_major(2, 3, 1), block_major(2, 3, 2)
    route = route_between(source.group, target.group)
    assert len(route.plan([], []).window((0, 1))) == 0
    assert len(route.plan([0], [1]).window(())) == 0
    assert route.plan([], []).nbytes((0, 1)) == 0
    assert len(Pieces.join([])) == 0


@pytest.mark.parametrize(
    ("sources", "targets", "says"),
    [
        ([3], [0], r"source: block 3 is outside 0\.\.2"),
        ([0], [4], r"target: block 4 is outside 0\.\.3"),
        ([-1], [0], "block -1"),
        ([2**70], [0], "outside"),
        ([0], [0.5], "outside"),
        ([0, 1], [2, 2], "named twice"),
        ([0, 1, 2], [2, 1, 2], "named twice"),
        ([0, 1, 2], [1, 0, 1], "named twice"),
        ([0, 1], [2], "2 source blocks for 1"),
    ],
)
def test_bad_block_ids_are_refused_by_name(sources, targets, says):
    route = route_between(block_major(2, 3, 1).group, block_major(2, 4, 2).group)
    with pytest.raises(BadBlocks, match=says):
        route.plan(sources, targets)


def test_one_source_block_may_fill_several_targets():
    source, target = block_major(2, 3, 1), block_major(2, 4, 2)
    wanted = block_by_block(source, target, (0, 1), [(1, 0), (1, 3), (1, 1)])
    execute(
        route_between(source.group, target.group).plan([1, 1, 1], [0, 3, 1]).window((0, 1)),
        source.memory,
        target.memory,
    )
    assert np.array_equal(target.memory, wanted)


def test_sides_of_other_layers_dtypes_or_sizes_are_refused_by_layer():
    kind, shapes = FAMILIES["gqa"]
    whole = block_major(2, 3, 1).group
    with pytest.raises(LayoutMismatch, match="layers"):
        route_between(whole, block_major(3, 3, 1).group)
    for dtype, axes in [("float16", shapes[0][2]), ("bfloat16", (("head", 2), ("token", 8), ("content", 12)))]:
        other = [(shapes[0][0], dtype, axes)]
        group = side_of(other, kind, range(2), 3, orders=natural(other, cross=True), cross=True).group
        with pytest.raises(LayoutMismatch, match="layer 0"):
            route_between(whole, group)


def test_planes_that_touch_but_step_differently_are_not_joined():
    """K and V adjacent for block 0 only: the K of a block is followed by padding on one side or the other."""
    from_, to, length = (np.array([at], np.int64) for at in (0, 0, 8))
    one = columns_of(from_, to, length, 16, 16)
    for source_step, target_step in [(24, 16), (16, 24)]:
        other = columns_of(from_ + 8, to + 8, length, source_step, target_step)
        assert merged_columns([one, other]).length.tolist() == [8, 8]
    assert merged_columns([columns_of(from_ + 8, to + 8, length, 16, 16), one]).length.tolist() == [16]
