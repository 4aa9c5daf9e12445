"""Groups of layers that share a block table, and a layout: all groups of one side.

A side is any memory that holds blocks of these planes: an engine's cache, a slab (whose "blocks" are slots), a
staging buffer. Copies go between two layouts with equal content. Does not know who owns the memory.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec

from layercast.errors import BadPlane, LayerInTwoGroups, PlaneWithoutGroup
from layercast.spec.planes import Dim, Plane


class GroupKind(StrEnum):
    """How a group's blocks are used by attention."""

    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"
    RECURRENT = "recurrent"


class GroupSpec(msgspec.Struct, frozen=True):
    """What an engine says of a group before its tensors are known.

    block_size: tokens per block; for a recurrent group, the spacing of positions that may hold a snapshot.
    layers: ids of the layers in it. window: tokens a query sees (itself included), for a WINDOW group.
    """

    name: str
    kind: GroupKind
    block_size: int
    layers: tuple[int, ...]
    window: int | None = None


class Group(msgspec.Struct, frozen=True):
    """A group with its planes, in order of layer and then of registration."""

    spec: GroupSpec
    planes: tuple[Plane, ...]

    @property
    def name(self) -> str:
        """The group's name."""
        return self.spec.name

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of the group's layers, ascending."""
        return tuple(sorted(self.spec.layers))

    @property
    def blocks(self) -> int:
        """Number of blocks that every plane of the group has."""
        return min(plane.blocks for plane in self.planes)

    @property
    def block_major(self) -> bool:
        """Whether all layers of a block lie one after the other, before those of the next block."""
        planes = sorted(self.planes, key=lambda plane: plane.base)
        first, last = planes[0], planes[-1]
        return (
            len(self.spec.layers) > 1
            and all(one.base + one.span <= other.base for one, other in pairwise(planes))
            and all(plane.block_stride == first.block_stride for plane in planes)
            and last.base + last.span <= first.base + first.block_stride
        )

    def planes_of(self, layer: int) -> tuple[Plane, ...]:
        """The planes of one layer."""
        return tuple(plane for plane in self.planes if plane.layer == layer)

    def layer_bytes(self, layer: int) -> int:
        """Payload bytes of one block in one layer."""
        return sum(plane.block_bytes for plane in self.planes_of(layer))

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block over all layers."""
        return sum(plane.block_bytes for plane in self.planes)


class Layout(msgspec.Struct, frozen=True):
    """All groups of one side."""

    groups: tuple[Group, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of all layers, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    def group_of(self, layer: int) -> int:
        """Index of the group that holds a layer."""
        return next(index for index, group in enumerate(self.groups) if layer in group.spec.layers)


def layout_of(specs: Sequence[GroupSpec], planes: Iterable[Plane]) -> Layout:
    """The layout of registered planes under the engine's groups.

    Raises LayerInTwoGroups, PlaneWithoutGroup or BadPlane, each naming the layer or plane.
    """
    owner: dict[int, str] = {}
    for spec in specs:
        if spec.block_size < 1 or not spec.layers:
            raise BadPlane(f"group {spec.name!r}: needs a block size of at least 1 and at least one layer")
        if spec.kind is GroupKind.WINDOW and (spec.window is None or spec.window < 1):
            raise BadPlane(f"group {spec.name!r}: a window group must say how many tokens its window has")
        for layer in spec.layers:
            if layer in owner:
                raise LayerInTwoGroups(f"layer {layer} is in group {owner[layer]!r} and in group {spec.name!r}")
            owner[layer] = spec.name
    members: dict[str, list[Plane]] = {spec.name: [] for spec in specs}
    if len(members) != len(specs):
        raise BadPlane(f"group names repeat: {[spec.name for spec in specs]}")
    names: set[str] = set()
    for plane in planes:
        if plane.layer not in owner:
            raise PlaneWithoutGroup(f"plane {plane.name!r} is of layer {plane.layer}, which no group names")
        if plane.name in names:
            raise BadPlane(f"two planes are named {plane.name!r}")
        names.add(plane.name)
        members[owner[plane.layer]].append(plane)
    return Layout(tuple(_group(spec, members[spec.name]) for spec in specs))


def _group(spec: GroupSpec, planes: list[Plane]) -> Group:
    bare = sorted(set(spec.layers) - {plane.layer for plane in planes})
    if bare:
        raise BadPlane(f"group {spec.name!r}: layers {bare} have no registered plane")
    counts = {plane.blocks for plane in planes}
    if len(counts) != 1:
        raise BadPlane(f"group {spec.name!r}: its planes disagree on the number of blocks: {sorted(counts)}")
    return Group(spec, tuple(sorted(planes, key=lambda plane: plane.layer)))


def packed_like(group: Group, bases: dict[int, int], slots: int, stride: int | None = None) -> Group:
    """The group's planes laid out densely, `[slot][plane bytes]` in each layer, starting at `bases[layer]`.

    Inside a block each plane keeps the axis order of its source memory, so that whole blocks copy as one run.
    stride: bytes from a slot to the next, where not those of one layer.
    """
    planes = []
    for layer in group.layers:
        step, at = stride or group.layer_bytes(layer), bases[layer]
        for plane in group.planes_of(layer):
            planes.append(msgspec.structs.replace(plane, base=at, blocks=slots, block_stride=step, dims=_dense(plane)))
            at += plane.block_bytes
    return Group(group.spec, tuple(planes))


def _dense(plane: Plane) -> tuple[Dim, ...]:
    """The plane's axes without gaps, keeping their order in memory."""
    strides: dict[str, int] = {}
    reach = plane.item_bytes
    for dim in sorted(plane.dims, key=lambda d: (d.stride, d.size)):
        strides[dim.name] = reach
        reach *= dim.size
    return tuple(msgspec.structs.replace(dim, stride=strides[dim.name]) for dim in plane.dims)
