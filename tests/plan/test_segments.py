import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_model import FAMILIES, natural, side_of, sides

from layercast.errors import LayoutMismatch, WholeBlocksOnly
from layercast.plan.segments import matched_segments

SHAPES = {name: FAMILIES[name] for name in ("gqa", "mha", "packed-heads")}


@st.composite
def cut_copies(draw):
    """Two planes in unrelated layouts, and a cut along each axis that may be cut."""
    kind, shapes = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    source, target = draw(sides(shapes, kind, (0,), 1)), draw(sides(shapes, kind, (0,), 2))
    cuts = {}
    for dim in source.group.planes[0].dims:
        if draw(st.booleans()):
            size = draw(st.integers(1, dim.size))
            cuts[dim.name] = (draw(st.integers(0, dim.size - size)), draw(st.integers(0, dim.size - size)), size)
    return source, target, cuts


@settings(max_examples=200, deadline=None)
@given(cut_copies())
def test_segments_of_a_cut_copy_what_slicing_copies(case):
    source, target, cuts = case
    plane, other = source.group.planes[0], target.group.planes[0]
    ours, theirs = source.views[0][0], target.views[0][0]
    kept = target.memory.copy()
    whole = (0, 0, None)
    named = [cuts.get(dim.name, whole) for dim in plane.dims]
    from_ = tuple(slice(a, None if size is None else a + size) for a, _, size in named)
    to = tuple(slice(b, None if size is None else b + size) for _, b, size in named)
    theirs[(0, *to)] = ours[(0, *from_)]
    wanted = target.memory.copy()
    target.memory[:] = kept
    total = 0
    for a, b, length in zip(*(array.tolist() for array in matched_segments(plane, other, cuts)), strict=True):
        target.memory[other.base + b : other.base + b + length] = source.memory[
            plane.base + a : plane.base + a + length
        ]
        total += length
    assert np.array_equal(target.memory, wanted)
    assert total == plane.item_bytes * np.prod([cuts.get(dim.name, (0, 0, dim.size))[2] for dim in plane.dims])


def plane(name: str, order=None):
    kind, shapes = FAMILIES[name]
    orders = [order] if order else natural(shapes, cross=False)
    return side_of(shapes, kind, (0,), 3, orders=orders, cross=False).group.planes[0]


def test_equal_layouts_are_one_segment():
    from_, to, length = matched_segments(plane("gqa"), plane("gqa"))
    assert (from_.tolist(), to.tolist(), length.tolist()) == ([0], [0], [plane("gqa").block_bytes])


def test_head_first_and_token_first_share_only_the_rows():
    lengths = matched_segments(plane("gqa"), plane("gqa", (0, 2, 1, 3)))[2]
    assert lengths.tolist() == [2 * 12] * 8


@pytest.mark.parametrize("axis", ["token", "head"])
def test_an_opaque_block_is_never_cut(axis):
    with pytest.raises(WholeBlocksOnly, match=r"0\.kv.*whole blocks"):
        matched_segments(plane("opaque"), plane("opaque"), {axis: (0, 0, 1)})


def test_a_packed_block_may_be_cut_by_heads_but_not_by_tokens():
    assert len(matched_segments(plane("packed-heads"), plane("packed-heads"), {"head": (0, 1, 1)})[0]) == 1
    with pytest.raises(WholeBlocksOnly):
        matched_segments(plane("packed-heads"), plane("packed-heads"), {"token": (0, 0, 1)})


@pytest.mark.parametrize("cut", [(0, 0, 3), (1, 0, 2), (0, 1, 2), (0, 0, 0), (-1, 0, 1)])
def test_a_cut_out_of_range_is_refused(cut):
    with pytest.raises(LayoutMismatch, match="out of range"):
        matched_segments(plane("gqa"), plane("gqa"), {"head": cut})


def test_planes_of_other_elements_or_axes_are_refused():
    with pytest.raises(LayoutMismatch, match="elements"):
        matched_segments(plane("gqa"), plane("mha"))
    with pytest.raises(LayoutMismatch, match="axes"):
        matched_segments(plane("mha"), plane("packed-heads"))
    with pytest.raises(LayoutMismatch, match="'content' has"):
        matched_segments(plane("gqa"), plane("window"))
