import pytest

from layercast.errors import BadPlane, LayerInTwoGroups, PlaneWithoutGroup
from layercast.spec.groups import GroupKind, GroupSpec, layout_of, packed_like
from layercast.spec.planes import PlaneKind, plane_of_tensor


def plane(layer: int, kind=PlaneKind.KV, *, name=None, blocks=4, dtype="bfloat16", sizes=(2, 16, 8), address=0):
    """A dense plane, block first; axes by number of sizes."""
    axes = {1: ("content",), 2: ("token", "content"), 3: ("head", "token", "content")}[len(sizes)]
    strides = [1]
    for size in reversed(sizes):
        strides.insert(0, strides[0] * size)
    return plane_of_tensor(
        name or f"layers.{layer}.{kind}", layer, kind, dtype, address, (blocks, *sizes), strides, ("block", *axes)
    )


def full(name="full", layers=(0, 1), size=16) -> GroupSpec:
    return GroupSpec(name, GroupKind.FULL, size, tuple(layers))


def test_every_family_is_a_layout():
    """Attention, window, latent with indexer, recurrent, and a draft layer behind the model's."""
    layout = layout_of(
        [
            full("full", (0, 6)),
            GroupSpec("window", GroupKind.WINDOW, 32, (1,), 100),
            GroupSpec("latent", GroupKind.LATENT, 64, (2, 3)),
            GroupSpec("state", GroupKind.RECURRENT, 1024, (4, 5)),
        ],
        [
            plane(6, name="draft.0.kv", sizes=(4, 16, 8)),
            plane(0, PlaneKind.KEY, dtype="float8_e4m3fn"),
            plane(0, PlaneKind.VALUE),
            plane(1, sizes=(2, 32, 8)),
            *(plane(layer, PlaneKind.LATENT, sizes=(64, 576)) for layer in (2, 3)),
            plane(2, PlaneKind.INDEXER, dtype="uint8", sizes=(64, 132)),
            *(plane(layer, PlaneKind.CONV, sizes=(40,), blocks=9) for layer in (4, 5)),
            *(plane(layer, PlaneKind.STATE, dtype="float32", sizes=(100,), blocks=9) for layer in (4, 5)),
        ],
    )
    assert layout.layers == tuple(range(7))
    assert [layout.group_of(layer) for layer in range(7)] == [0, 1, 2, 2, 3, 3, 0]
    attention, window, latent, state = layout.groups
    assert [p.name for p in attention.planes] == ["layers.0.key", "layers.0.value", "draft.0.kv"]
    assert attention.layer_bytes(0) == 2 * 16 * 8 * (1 + 2)
    assert attention.layer_bytes(6) == 4 * 16 * 8 * 2
    assert attention.block_bytes == attention.layer_bytes(0) + attention.layer_bytes(6)
    assert latent.layer_bytes(2) - latent.layer_bytes(3) == 64 * 132
    assert (state.blocks, window.blocks) == (9, 4)
    assert state.block_bytes == 2 * (40 * 2 + 100 * 4)


def test_a_layer_in_two_groups_is_refused_by_number():
    with pytest.raises(LayerInTwoGroups, match="layer 1 is in group 'a' and in group 'b'"):
        layout_of([full("a", (0, 1)), full("b", (1, 2))], [plane(layer) for layer in range(3)])


def test_a_layer_named_twice_by_one_group_is_refused():
    with pytest.raises(LayerInTwoGroups, match="layer 1"):
        layout_of([full("a", (1, 1))], [plane(1)])


def test_a_plane_that_no_group_names_is_refused_by_name():
    """A draft layer that a configuration forgot: what is registered is the authority."""
    with pytest.raises(PlaneWithoutGroup, match=r"'draft\.0\.kv' is of layer 2"):
        layout_of([full()], [plane(0), plane(1), plane(2, name="draft.0.kv")])


@pytest.mark.parametrize(
    ("specs", "planes", "says"),
    [
        ([full()], [plane(0)], r"'full': layers \[1\] have no registered plane"),
        ([full()], [plane(0), plane(1, blocks=5)], r"disagree on the number of blocks: \[4, 5\]"),
        ([full()], [plane(0), plane(1, name="layers.0.kv")], r"two planes are named 'layers\.0\.kv'"),
        ([full(layers=())], [], "at least one layer"),
        ([full(size=0)], [plane(0), plane(1)], "block size of at least 1"),
        ([full(layers=(0,)), full(layers=(1,))], [plane(0), plane(1)], "group names repeat"),
        ([GroupSpec("w", GroupKind.WINDOW, 16, (0,))], [plane(0)], "'w': a window group must say"),
        ([GroupSpec("w", GroupKind.WINDOW, 16, (0,), 0)], [plane(0)], "'w': a window group must say"),
    ],
)
def test_groups_and_planes_that_do_not_fit_are_refused_by_name(specs, planes, says):
    with pytest.raises(BadPlane, match=says):
        layout_of(specs, planes)


def test_a_packed_group_has_no_gaps_between_slots_and_planes():
    planes = [plane(layer, kind) for layer in (0, 1) for kind in (PlaneKind.KEY, PlaneKind.VALUE)]
    group = layout_of([full()], planes).groups[0]
    packed = packed_like(group, {0: 1000, 1: 9000}, slots=7)
    key, value = packed.planes_of(0)
    assert (key.base, value.base, packed.planes_of(1)[0].base) == (1000, 1000 + key.block_bytes, 9000)
    assert packed.blocks == 7
    for slab in packed.planes:
        assert slab.block_stride == group.layer_bytes(slab.layer)
        assert slab.span == slab.block_bytes
    assert [p.content for p in packed.planes] == [p.content for p in group.planes]


def test_a_packed_block_keeps_the_axis_order_of_its_source_memory():
    token_first = plane_of_tensor(
        "kv", 0, PlaneKind.KV, "bfloat16", 0, (4, 2, 16, 8), (300, 8, 16, 1), ("block", "head", "token", "content")
    )
    packed = packed_like(layout_of([full(layers=(0,))], [token_first]).groups[0], {0: 0}, 4).planes[0]
    assert packed.dims == token_first.dims
    assert packed.block_stride == packed.block_bytes < token_first.block_stride
