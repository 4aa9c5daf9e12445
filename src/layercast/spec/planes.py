"""A plane: one registered cache tensor of one layer, described by strides and dtype alone.

A plane says which axes can be cut by listing them: attention KV has a head and a token axis, a packed
block only what may be sliced without knowing its inside, a recurrent state neither.
Does not know models, engines or how bytes move.
"""

from collections.abc import Sequence
from enum import StrEnum
from math import prod

import msgspec

from layercast.errors import BadPlane
from layercast.spec.dtypes import item_bytes

BLOCK, HEAD, TOKEN = "block", "head", "token"


class PlaneKind(StrEnum):
    """What a plane holds."""

    KV = "kv"
    KEY = "key"
    VALUE = "value"
    LATENT = "latent"
    ROPE = "rope"
    INDEXER = "indexer"
    CONV = "conv"
    STATE = "state"


class Dim(msgspec.Struct, frozen=True):
    """One axis inside a block: its name, its size in elements, its stride in bytes."""

    name: str
    size: int
    stride: int


class Plane(msgspec.Struct, frozen=True):
    """Where one cache tensor of one layer lies.

    base: address of block 0 in bytes. block_stride: bytes from a block to the next one.
    dims: the axes inside a block, in the order of the registered tensor; their strides are bytes.
    """

    name: str
    layer: int
    kind: PlaneKind
    dtype: str
    base: int
    blocks: int
    block_stride: int
    dims: tuple[Dim, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return item_bytes(self.dtype, self.name)

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block (gaps between its parts not counted)."""
        return self.item_bytes * prod(dim.size for dim in self.dims)

    @property
    def span(self) -> int:
        """Bytes from the first to one past the last byte of one block, gaps included."""
        return self.item_bytes + sum((dim.size - 1) * dim.stride for dim in self.dims)

    @property
    def end(self) -> int:
        """Address one past the plane's last byte."""
        return self.base + (self.blocks - 1) * self.block_stride + self.span

    def axis(self, name: str) -> Dim | None:
        """The axis of that name, or None where this plane can't be cut along it."""
        return next((dim for dim in self.dims if dim.name == name), None)

    @property
    def geometry(self) -> tuple[object, ...]:
        """What two planes share when one plan, moved by an offset, is right for both."""
        return (self.kind, self.item_bytes, self.block_stride, self.dims)

    @property
    def content(self) -> tuple[object, ...]:
        """What the two sides of a copy must agree on: element type and the named sizes of a block."""
        return (self.kind, self.dtype, tuple(sorted((dim.name, dim.size) for dim in self.dims)))


def plane_of_tensor(
    name: str,
    layer: int,
    kind: PlaneKind,
    dtype: str,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    axes: Sequence[str],
) -> Plane:
    """A plane from a tensor's address (bytes), shape, strides (elements) and one name per axis.

    Exactly one axis is "block". Raises UnknownDtype or BadPlane, naming the plane.
    """
    item = item_bytes(dtype, name)
    if not len(shape) == len(strides) == len(axes):
        raise BadPlane(f"{name}: {len(shape)} sizes, {len(strides)} strides and {len(axes)} axis names")
    if list(axes).count(BLOCK) != 1 or len(set(axes)) != len(axes):
        raise BadPlane(f"{name}: axes {tuple(axes)} need distinct names and exactly one {BLOCK!r}")
    if any(size < 1 for size in shape):
        raise BadPlane(f"{name}: shape {tuple(shape)} has an empty axis")
    if any(stride < 1 for size, stride in zip(shape, strides, strict=True) if size > 1):
        raise BadPlane(f"{name}: strides {tuple(strides)} must be positive (is the tensor expanded?)")
    at = list(axes).index(BLOCK)
    plane = Plane(
        name=name,
        layer=layer,
        kind=kind,
        dtype=dtype,
        base=address,
        blocks=shape[at],
        block_stride=strides[at] * item,
        dims=tuple(
            Dim(axis, size, stride * item)
            for axis, size, stride in zip(axes, shape, strides, strict=True)
            if axis != BLOCK
        ),
    )
    _refuse_overlap(plane)
    return plane


def _refuse_overlap(plane: Plane) -> None:
    """Two elements of one tensor at one address can't be restored: refuse the strides."""
    reach = plane.item_bytes
    axes = [*plane.dims, Dim(BLOCK, plane.blocks, plane.block_stride)]
    for dim in sorted((d for d in axes if d.size > 1), key=lambda d: d.stride):
        if dim.stride < reach:
            raise BadPlane(f"{plane.name}: elements along {dim.name!r} overlap (stride {dim.stride} bytes < {reach})")
        reach = dim.stride * (dim.size - 1) + reach
