"""The engine's paged memory: for each group, the tensors that hold its blocks, and the layout that describes them.

A block of one layer is contiguous: the key rows of all its tokens, then the value rows. Block 0 of every attention
group stays zero: it pads the block tables of ragged batches. Does not know who holds which block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from layercast.connector.transformers.geometry import Content, Geometry, Part
from layercast.spec.groups import GroupKind, GroupSpec, Layout, layout_of
from layercast.spec.planes import BLOCK, HEAD, TOKEN, Plane, PlaneKind, plane_of_tensor

ALIGN = 16
CONTENT = "content"
AXES = {
    **dict.fromkeys((PlaneKind.LATENT, PlaneKind.ROPE), (BLOCK, TOKEN, CONTENT)),
    **dict.fromkeys((PlaneKind.CONV, PlaneKind.STATE), (BLOCK, CONTENT)),
}
"""Of the kinds that have no heads to cut."""


class PagedMemory:
    """Tensors `[blocks, *shape]` of every layer; `layout` names them for everybody else.

    counts: blocks of each group, in the order of `specs`. block_major: all layers of a block lie together.
    """

    def __init__(
        self, geometry: Geometry, specs: Sequence[GroupSpec], counts: Sequence[int], *, block_major: bool = False
    ) -> None:
        self.specs = tuple(specs)
        self.tensors: dict[int, dict[PlaneKind, torch.Tensor]] = {}
        self._bytes: list[list[torch.Tensor]] = []
        parts = {part.id: part for part in geometry.parts}
        planes: list[Plane] = []
        for spec, count in zip(specs, counts, strict=True):
            fields = {layer: _fields(parts[layer], spec.block_size) for layer in spec.layers}
            rows = _storage(fields, count, block_major, parts[spec.layers[0]].device)
            self._bytes.append(list(rows.values()))
            for layer, row in rows.items():
                self.tensors[layer] = _cut(row, fields[layer])
                planes += [_plane(layer, kind, tensor) for kind, tensor in self.tensors[layer].items()]
        self.layout: Layout = layout_of(specs, planes)

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one attention part: `[blocks, tokens, heads, width]` each."""
        keys, values = self.tensors[layer].values()
        return keys, values

    def states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Conv and recurrent state of one recurrent part: `[blocks, ...]` each."""
        return self.tensors[layer][PlaneKind.CONV], self.tensors[layer].get(PlaneKind.STATE)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy every layer of one block of a group onto another one."""
        for row in self._bytes[group]:
            row[target].copy_(row[source])

    def poison(self, group: int, blocks: Iterable[int]) -> None:
        """Fill blocks with NaN, in every layer, so that a read of a free block shows."""
        ids = list(blocks)
        for row in self._bytes[group]:
            row[ids] = 255  # all bits set is a NaN in every float type


def first_block(spec: GroupSpec) -> int:
    """The first block that may be handed out: block 0 of an attention group is the zero block."""
    return 0 if spec.kind is GroupKind.RECURRENT else 1


def _fields(part: Part, block_size: int) -> tuple[Content, ...]:
    """The tensors inside a block of one layer."""
    if part.kind is GroupKind.RECURRENT:
        return part.contents
    return tuple(replace(content, shape=(block_size, *content.shape)) for content in part.contents)


def _room(field: Content) -> int:
    """Bytes of a field in a block, rounded up so that the next one is aligned."""
    return -(-field.nbytes // ALIGN) * ALIGN


def _storage(
    fields: dict[int, tuple[Content, ...]], blocks: int, block_major: bool, device: torch.device
) -> dict[int, torch.Tensor]:
    """Bytes `[blocks, bytes of a block]` of each layer, apart or interleaved by block."""
    sizes = {layer: sum(map(_room, fields[layer])) for layer in fields}
    if not block_major:
        return {layer: torch.zeros(blocks, size, dtype=torch.uint8, device=device) for layer, size in sizes.items()}
    whole = torch.zeros(blocks, sum(sizes.values()), dtype=torch.uint8, device=device)
    return dict(zip(sizes, whole.split(list(sizes.values()), dim=1), strict=True))


def _cut(row: torch.Tensor, fields: Iterable[Content]) -> dict[PlaneKind, torch.Tensor]:
    """The tensors of one layer as views of its bytes."""
    tensors: dict[PlaneKind, Any] = {}
    at = 0
    for field in fields:
        tensors[field.kind] = row[:, at : at + field.nbytes].view(field.dtype).unflatten(1, field.shape)
        at += _room(field)
    return tensors


def _plane(layer: int, kind: PlaneKind, tensor: torch.Tensor) -> Plane:
    """The plane of one tensor; axes that may not be cut are joined into one."""
    axes = AXES.get(kind, (BLOCK, TOKEN, HEAD, CONTENT))
    seen = tensor.flatten(len(axes) - 1)
    return plane_of_tensor(
        name=f"layer {layer} {kind.value}",
        layer=layer,
        kind=kind,
        dtype=str(seen.dtype).removeprefix("torch."),
        address=seen.data_ptr(),
        shape=tuple(seen.shape),
        strides=tuple(seen.stride()),
        axes=axes,
    )
