from itertools import permutations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.errors import BadPlane, UnknownDtype
from layercast.spec.planes import Dim, PlaneKind, plane_of_tensor

AXES = ("block", "head", "token", "content")
SHAPE = (5, 2, 4, 6)


def plane_of_view(view: np.ndarray, axes=AXES, *, base: np.ndarray, kind=PlaneKind.KV, dtype="uint8"):
    address = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    strides = [stride // view.itemsize for stride in view.strides]
    return plane_of_tensor("kv", 0, kind, dtype, address, view.shape, strides, axes)


def byte_at(memory: np.ndarray, plane, block: int, index: tuple[int, ...]) -> int:
    at = plane.base + block * plane.block_stride + sum(i * d.stride for i, d in zip(index, plane.dims, strict=True))
    return int(memory[at])


def memory_orders():
    """One logical tensor [block, head, token, content] of K then V, in the orders that engines use."""
    logical = (np.arange(np.prod(SHAPE)) % 251).astype(np.uint8).reshape(SHAPE)
    blocks, heads, tokens, width = SHAPE
    head_first = logical.copy()
    token_first = np.ascontiguousarray(logical.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    block_major = np.zeros((blocks, 3, heads, tokens, width), np.uint8)
    block_major[:, 1] = logical
    layer_major = np.zeros((3, blocks, heads, tokens, width + 2), np.uint8)
    layer_major[2, ..., :width] = logical
    head_outer = np.ascontiguousarray(logical.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3)
    return logical, {
        "head first": (head_first, head_first),
        "token first": (token_first, token_first),
        "block-major": (block_major[:, 1], block_major),
        "layer-major, a view with gaps": (layer_major[2, ..., :width], layer_major),
        "head outside block": (head_outer, head_outer),
    }


@pytest.mark.parametrize("name", list(memory_orders()[1]))
def test_a_plane_finds_each_byte_of_one_tensor_in_any_memory_order(name):
    logical, orders = memory_orders()
    view, base = orders[name]
    plane = plane_of_view(view, base=base)
    flat = np.lib.stride_tricks.as_strided(base, (base.size,), (1,))
    for index in np.ndindex(SHAPE):
        assert byte_at(flat, plane, index[0], index[1:]) == logical[index]
    assert plane.block_bytes == 2 * 4 * 6
    assert plane.end <= base.size


@given(
    st.sampled_from(list(permutations(range(4)))),
    st.sampled_from([("float32", 4), ("bfloat16", 2), ("float8_e5m2", 1)]),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_sizes_follow_from_strides_and_dtype_in_any_order(order, dtype, shape):
    memory = np.zeros([shape[axis] for axis in order], f"u{dtype[1]}")
    view = memory.transpose(np.argsort(order))
    plane = plane_of_view(view, base=memory, dtype=dtype[0])
    assert plane.blocks == shape[0]
    assert plane.block_bytes == dtype[1] * shape[1] * shape[2] * shape[3]
    assert plane.span >= plane.block_bytes
    assert plane.end == memory.nbytes
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plane), type=type(plane)) == plane


def test_a_latent_a_state_and_an_opaque_block_are_planes_with_fewer_axes():
    latent = plane_of_tensor(
        "l", 0, PlaneKind.LATENT, "bfloat16", 64, (9, 16, 576), (9216, 576, 1), ("block", "token", "content")
    )
    state = plane_of_tensor("s", 1, PlaneKind.STATE, "float32", 0, (4, 1000), (1536, 1), ("block", "content"))
    assert latent.axis("head") is None
    assert latent.axis("token") == Dim("token", 16, 1152)
    assert latent.block_bytes == 16 * 576 * 2
    assert state.axis("token") is None
    assert (state.block_bytes, state.block_stride, state.end) == (4000, 6144, 3 * 6144 + 4000)


def test_content_ignores_strides_and_geometry_does_not():
    _, orders = memory_orders()
    one, two = (plane_of_view(view, base=base) for view, base in (orders["head first"], orders["token first"]))
    assert one.content == two.content
    assert one.geometry != two.geometry


@pytest.mark.parametrize(
    ("shape", "strides", "axes", "says"),
    [
        ((5, 4), (4, 1), ("block",), "2 sizes, 2 strides and 1 axis names"),
        ((5, 4), (4, 1), ("token", "content"), "exactly one 'block'"),
        ((5, 4), (4, 1), ("block", "block"), "exactly one 'block'"),
        ((5, 4, 4), (16, 4, 1), ("block", "token", "token"), "distinct names"),
        ((0, 4), (4, 1), ("block", "content"), "empty axis"),
        ((5, 4), (4, 0), ("block", "content"), "must be positive"),
        ((5, 4), (-4, 1), ("block", "content"), "must be positive"),
        ((5, 4), (3, 1), ("block", "content"), "elements along 'block' overlap"),
        ((5, 2, 4), (8, 3, 1), ("block", "token", "content"), "elements along 'token' overlap"),
    ],
)
def test_shapes_and_strides_that_cannot_be_right_are_refused_by_name(shape, strides, axes, says):
    with pytest.raises(BadPlane, match=f"layers.7.k: .*{says}"):
        plane_of_tensor("layers.7.k", 7, PlaneKind.KEY, "float16", 0, shape, strides, axes)


def test_a_plane_of_unknown_dtype_is_refused_by_name():
    with pytest.raises(UnknownDtype, match=r"layers\.7\.k"):
        plane_of_tensor("layers.7.k", 7, PlaneKind.KEY, "nvfp4", 0, (1, 1), (1, 1), ("block", "content"))


def test_the_stride_of_an_axis_of_one_does_not_matter():
    plane = plane_of_tensor("kv", 0, PlaneKind.KV, "uint8", 0, (3, 1, 8), (8, 0, 1), ("block", "head", "content"))
    assert (plane.block_bytes, plane.span) == (8, 8)
