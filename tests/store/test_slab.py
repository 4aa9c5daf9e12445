import mmap
import resource
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercast.errors import BadBlocks, OutOfMemory, Refused
from layercast.plan.pieces import route_between
from layercast.spec.groups import Group, GroupKind, GroupSpec, Layout
from layercast.spec.planes import Dim, Plane, PlaneKind
from layercast.store import slab as slab_room
from layercast.store.slab import SNAPSHOT_TOKENS, Slab, slab_bytes, slots_for

MIB = 1 << 20


def group(name, kind, block_size, layers, elements, planes=2):
    """A group whose layers have `planes` planes of `elements` float16 a block, at made-up engine addresses."""
    return Group(
        GroupSpec(name, kind, block_size, tuple(layers), 64 if kind is GroupKind.WINDOW else None),
        tuple(
            Plane(
                f"{name}.{layer}.{p}",
                layer,
                PlaneKind.KV,
                "float16",
                1 << 40,
                9,
                4 * elements,
                (Dim("x", elements, 2),),
            )
            for layer in layers
            for p in range(planes)
        ),
    )


def mixed():
    return Layout(
        (
            group("full", GroupKind.FULL, 16, (0, 3), 100),
            group("window", GroupKind.WINDOW, 32, (1,), 64),
            group("state", GroupKind.RECURRENT, 16, (2, 4), 5000, planes=1),
        )
    )


groups = st.builds(
    lambda kinds: Layout(
        tuple(
            group(f"g{at}", kind, size, range(at * 10, at * 10 + layers), elements)
            for at, (kind, size, layers, elements) in enumerate(kinds)
        )
    ),
    st.lists(
        st.tuples(st.sampled_from(GroupKind), st.integers(1, 300), st.integers(1, 4), st.integers(1, 5000)),
        min_size=1,
        max_size=4,
    ),
)


@given(groups, st.integers(1, 1 << 36))
def test_slots_never_take_more_than_host_bytes_and_cover_equal_tokens(layout, host_bytes):
    """And one step more of coverage would not fit, so no memory is left idle."""
    ones = (1,) * len(layout.groups)
    if host_bytes < slab_bytes(layout, ones):
        with pytest.raises(Refused, match="raise host_bytes"):
            slots_for(layout, host_bytes)
        return
    slots = slots_for(layout, host_bytes)
    assert slab_bytes(layout, slots) <= host_bytes
    sizes = [slab_room.tokens_per_slot(g) for g in layout.groups]
    covered = [count * size for count, size in zip(slots, sizes, strict=True)]
    assert max(c - s for c, s in zip(covered, sizes, strict=True)) < min(covered)
    following = min(covered) + 1
    assert slab_bytes(layout, tuple(-(-following // size) for size in sizes)) > host_bytes


def test_snapshots_get_a_slot_for_every_so_many_tokens():
    """Sixteen-token spacing of a state as large as 50 blocks would leave no room for attention."""
    full, window, state = slots_for(mixed(), 8 * MIB)
    assert full == pytest.approx(2 * window, abs=1)
    assert state == pytest.approx(full * 16 / SNAPSHOT_TOKENS, abs=1)


@pytest.mark.parametrize("host_bytes", [40_000, 65_536, 1_000_003, 4 * MIB])
def test_a_slab_takes_at_most_host_bytes_page_rounding_included(host_bytes):
    with closing(Slab.create(mixed(), host_bytes)) as slab:
        assert len(slab.owner) % mmap.PAGESIZE == 0
        assert slab.nbytes == len(slab.owner) + sum(d.nbytes for d in slab.digests) <= host_bytes
        assert slab.nbytes == slab_bytes(slab.layout, slab.slots)


def test_every_byte_of_every_slot_has_its_own_place():
    """Fill all slots of all layers with their own numbers; all of them read back."""
    with closing(Slab.create(mixed(), 300_000)) as slab:
        places = [
            (g, slot, layer)
            for g, owner in enumerate(slab.layout.groups)
            for layer in owner.layers
            for slot in range(owner.blocks)
        ]
        sizes = [slab.layout.groups[g].layer_bytes(layer) for g, _, layer in places]
        contents = [np.random.default_rng(at).bytes(size) for at, size in enumerate(sizes)]
        for place, content in zip(places, contents, strict=True):
            slab.write(*place, content)
        assert [slab.read(*place) for place in places] == contents


def test_the_layout_has_the_engines_planes_layer_major_inside_the_mapping():
    engine = mixed()
    with closing(Slab.create(engine, MIB)) as slab:
        base = np.frombuffer(slab.owner, np.uint8).ctypes.data
        end = base
        for mine, theirs in zip(slab.layout.groups, engine.groups, strict=True):
            assert mine.spec == theirs.spec
            assert [p.content for p in mine.planes] == [p.content for p in theirs.planes]
            for layer in mine.layers:
                first, last = mine.planes_of(layer)[0], mine.planes_of(layer)[-1]
                assert first.base % 64 == 0
                assert first.base >= end
                assert first.block_stride == mine.layer_bytes(layer)
                end = last.end
        assert end <= base + len(slab.owner)


def block_major(layers, elements, blocks):
    """An engine that keeps the layers of a block together, in this order, before those of the next block."""
    size = 2 * elements
    planes = [
        Plane(
            f"kv.{layer}",
            layer,
            PlaneKind.KV,
            "float16",
            (1 << 40) + at * size,
            blocks,
            len(layers) * size,
            (Dim("x", elements, 2),),
        )
        for at, layer in enumerate(layers)
    ]
    return Layout((Group(GroupSpec("full", GroupKind.FULL, 16, tuple(layers)), tuple(planes)),))


@settings(deadline=None)
@given(st.permutations(range(5)), st.integers(1, 700), st.integers(1, 9), st.randoms())
def test_a_block_whose_layers_lie_together_is_one_piece_to_its_slot(layers, elements, blocks, random):
    """Of all layers; and every byte of every slot has its own place there too."""
    engine = block_major(layers, elements, blocks)
    with closing(Slab.create(engine, MIB)) as slab:
        (mine,), (theirs,) = slab.layout.groups, engine.groups
        taken = sorted((p.base + slot * p.block_stride, p.span) for p in mine.planes for slot in range(mine.blocks))
        assert all(start + size <= after for (start, size), (after, _) in pairwise(taken))
        base = np.frombuffer(slab.owner, np.uint8).ctypes.data
        assert base <= taken[0][0]
        assert sum(taken[-1]) <= base + len(slab.owner)
        slots = random.sample(range(mine.blocks), min(blocks, mine.blocks))
        ids = random.sample(range(blocks), len(slots))
        pieces = route_between(theirs, mine).plan(ids, slots).window(range(5))
        assert int(pieces.count.sum()) <= len(ids)
        assert pieces.nbytes == len(ids) * theirs.block_bytes
        data = bytes(range(256)) * (2 * elements // 256 + 1)
        slab.write(0, slots[0], layers[0], data[: 2 * elements])
        assert slab.read(0, slots[0], layers[0]) == data[: 2 * elements]


def test_every_page_is_in_memory_before_the_first_save():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    slab = Slab.create(mixed(), 64 * MIB)
    try:
        assert resident() - before > 60 * MIB
    finally:
        slab.close()
    assert resident() - before < 8 * MIB


def test_pages_are_touched_where_the_kernel_knows_no_populate(monkeypatch):
    monkeypatch.setattr(slab_room, "_POPULATE_WRITE", 9999)
    test_every_page_is_in_memory_before_the_first_save()


def test_digests_have_a_row_a_layer_and_a_column_a_slot():
    with closing(Slab.create(mixed(), MIB)) as slab:
        for group_, digests in zip(slab.layout.groups, slab.digests, strict=True):
            assert digests.shape == (len(group_.layers), group_.blocks)
            assert digests.dtype == np.uint64


@pytest.mark.parametrize(("host_bytes", "free"), [(1 << 50, None), (2 * MIB, 1000 << 10)])
def test_a_slab_larger_than_what_is_available_is_refused_before_the_kernel_kills(monkeypatch, host_bytes, free):
    if free is not None:
        monkeypatch.setattr(slab_room, "memory_free", lambda: free)
    with pytest.raises(OutOfMemory, match="available now; lower host_bytes"):
        Slab.create(mixed(), host_bytes)


def test_a_refusal_of_the_system_names_the_size_and_the_setting():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, hard))
    try:
        with pytest.raises(OutOfMemory, match=r"refused \d+ bytes .*lower host_bytes"):
            Slab.create(mixed(), 256 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_less_than_one_block_of_each_group_is_refused():
    with pytest.raises(Refused, match="raise host_bytes"):
        Slab.create(mixed(), 20_000)


def test_a_closed_slab_yields_no_bytes_and_closing_twice_changes_nothing():
    slab = Slab.create(mixed(), MIB)
    slab.close()
    slab.close()
    with pytest.raises(ValueError, match="closed"):
        slab.read(0, 0, 0)


@pytest.mark.parametrize("slot", [-1, 10**6])
def test_a_slot_out_of_range_is_refused(slot):
    with closing(Slab.create(mixed(), MIB)) as slab, pytest.raises(BadBlocks):
        slab.read(0, slot, 0)
