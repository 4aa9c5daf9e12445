"""Sides whose memory is a numpy array, and pieces executed on it: the brute force that plans are compared with."""

import random
from dataclasses import dataclass
from math import prod

import numpy as np
from hypothesis import strategies as st

from layercast.plan.pieces import COLUMNS
from layercast.spec.dtypes import item_bytes
from layercast.spec.groups import Group, GroupKind, GroupSpec, layout_of
from layercast.spec.planes import PlaneKind, plane_of_tensor

H, N, C = 2, 4, 6

# family -> (group kind, planes as (kind, dtype, axes))
FAMILIES = {
    "gqa": (GroupKind.FULL, [(PlaneKind.KV, "bfloat16", (("head", H), ("token", N), ("content", 2 * C)))]),
    "mha": (
        GroupKind.FULL,
        [
            (PlaneKind.KEY, "float32", (("head", H), ("token", N), ("content", C))),
            (PlaneKind.VALUE, "float32", (("head", H), ("token", N), ("content", C))),
        ],
    ),
    "kv-dtypes": (
        GroupKind.FULL,
        [
            (PlaneKind.KEY, "float8_e4m3fn", (("head", H), ("token", N), ("content", C))),
            (PlaneKind.VALUE, "float16", (("head", H), ("token", N), ("content", C))),
        ],
    ),
    "mla": (
        GroupKind.LATENT,
        [
            (PlaneKind.LATENT, "bfloat16", (("token", N), ("content", 8))),
            (PlaneKind.ROPE, "bfloat16", (("token", N), ("content", 3))),
        ],
    ),
    "indexer": (
        GroupKind.LATENT,
        [
            (PlaneKind.LATENT, "bfloat16", (("token", N), ("content", 8))),
            (PlaneKind.INDEXER, "uint8", (("token", N), ("content", 5))),
        ],
    ),
    "window": (GroupKind.WINDOW, [(PlaneKind.KV, "float16", (("head", H), ("token", N), ("content", C)))]),
    "recurrent": (
        GroupKind.RECURRENT,
        [
            (PlaneKind.CONV, "bfloat16", (("content", 9),)),
            (PlaneKind.STATE, "float32", (("head", H), ("content", 7))),
        ],
    ),
    "packed-heads": (GroupKind.FULL, [(PlaneKind.KV, "float32", (("head", H), ("content", N * C)))]),
    "opaque": (GroupKind.FULL, [(PlaneKind.KV, "uint8", (("content", 21),))]),
}


@dataclass
class Side:
    """One side: flat memory, its group, and a logical view [block, *axes] of each plane of each layer."""

    memory: np.ndarray
    group: Group
    views: dict[int, list[np.ndarray]]


def side_of(shapes, kind, layers, blocks, *, orders, cross, gap=0, window=None, seed=0) -> Side:
    """A side whose planes lie in the given axis orders (permutations of logical axes), random bytes in it.

    cross: all layers of a plane in one tensor, with the layer axis where the order says.
    gap: unused elements after each innermost row, as in a view of a larger tensor.
    """
    tensors, at = [], 16
    for (plane, dtype, axes), order in zip(shapes, orders, strict=True):
        names = ["block", *(["layer"] if cross else []), *(name for name, _ in axes)]
        sizes = {"block": blocks, "layer": len(layers), **dict(axes)}
        shape = [sizes[names[i]] for i in order]
        shape[-1] += gap
        for nth in [None] if cross else range(len(layers)):
            tensors.append((plane, dtype, names, order, shape, nth, at))
            at += -(-prod(shape) * item_bytes(dtype) // 16) * 16 + 16
    memory = np.frombuffer(random.Random(seed).randbytes(at), np.uint8).copy()
    planes, views = [], {layer: [] for layer in layers}
    for plane, dtype, names, order, shape, nth, start in tensors:
        item = item_bytes(dtype)
        raw = memory[start : start + prod(shape) * item].view(f"u{item}").reshape(shape)
        raw = raw[..., : shape[-1] - gap]
        logical = raw.transpose(np.argsort(order))
        for index, layer in enumerate(layers):
            if nth not in (None, index):
                continue
            view = logical[:, index] if cross else logical
            address = view.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
            strides = [stride // item for stride in view.strides]
            tensor_axes = [name for name in names if name != "layer"]
            name = f"{layer}.{plane}"
            planes.append(plane_of_tensor(name, layer, plane, dtype, address, view.shape, strides, tensor_axes))
            views[layer].append(view)
    spec = GroupSpec("g", kind, N, tuple(layers), window if window else 8 if kind is GroupKind.WINDOW else None)
    return Side(memory, layout_of([spec], planes).groups[0], views)


@st.composite
def sides(draw, shapes, kind, layers, seed):
    """A side in any axis orders, per layer or with a layer axis anywhere."""
    cross = draw(st.booleans())
    orders = [draw(st.permutations(range(len(axes) + (2 if cross else 1)))) for _, _, axes in shapes]
    blocks = draw(st.integers(1, 9))
    return side_of(
        shapes, kind, layers, blocks, orders=orders, cross=cross, gap=draw(st.sampled_from([0, 0, 2])), seed=seed
    )


def natural(shapes, *, cross: bool) -> list[tuple[int, ...]]:
    """Block first (then layer), axes as listed: block-major where `cross`."""
    return [tuple(range(len(axes) + (2 if cross else 1))) for _, _, axes in shapes]


def execute(pieces, source: np.ndarray, target: np.ndarray) -> None:
    """Copy the pieces byte by byte, as slowly as they are written."""
    arrays = (getattr(pieces, name).tolist() for name in COLUMNS)
    for from_, to, length, count, from_step, to_step in zip(*arrays, strict=True):
        assert length > 0
        assert count > 0
        for row in range(count):
            a, b = from_ + row * from_step, to + row * to_step
            assert 0 <= a <= len(source) - length
            assert 0 <= b <= len(target) - length
            target[b : b + length] = source[a : a + length]


def touched(pieces, size: int) -> np.ndarray:
    """How often each target byte is written."""
    hits = np.zeros(size, np.int64)
    for to, length, count, step in zip(
        *(getattr(pieces, name).tolist() for name in ("target", "length", "count", "target_stride")), strict=True
    ):
        for row in range(count):
            hits[to + row * step : to + row * step + length] += 1
    return hits


def block_by_block(source: Side, target: Side, layers, pairs) -> np.ndarray:
    """The target's memory after copying each block of each plane by logical index."""
    kept = target.memory.copy()
    for layer in layers:
        for ours, theirs in zip(source.views[layer], target.views[layer], strict=True):
            for from_, to in pairs:
                theirs[to] = ours[from_]
    wanted = target.memory.copy()
    target.memory[:] = kept
    return wanted
