"""The engine's paged memory: for each group, the tensors that hold its blocks, and the layout that describes them.

A block of one layer is contiguous: the key rows of all its tokens, then the value rows. Block 0 of every attention
group stays zero: it pads the block tables of ragged batches. Does not know who holds which block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from layercast.connector.transformers.geometry import AttentionPart, Geometry, StatePart
from layercast.spec.groups import GroupKind, GroupSpec, Layout, layout_of
from layercast.spec.planes import BLOCK, HEAD, TOKEN, Plane, PlaneKind, plane_of_tensor

ALIGN = 16
CONTENT = "content"


@dataclass(frozen=True, slots=True)
class _Field:
    """One tensor inside a block of one layer."""

    kind: PlaneKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in a block, rounded up so that the next field is aligned."""
        return -(-prod(self.shape) * self.dtype.itemsize // ALIGN) * ALIGN


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
        parts: dict[int, AttentionPart | StatePart] = {part.id: part for part in geometry.attention}
        parts.update({part.id: part for part in geometry.states})
        planes: list[Plane] = []
        for spec, count in zip(specs, counts, strict=True):
            fields = {layer: _fields(parts[layer], spec.block_size) for layer in spec.layers}
            rows = _storage(fields, count, block_major, parts[spec.layers[0]].device)
            self._bytes.append(list(rows.values()))
            for layer, row in rows.items():
                self.tensors[layer] = _cut(row, fields[layer])
                planes += [_plane(layer, field, self.tensors[layer][field.kind]) for field in fields[layer]]
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


def _fields(part: AttentionPart | StatePart, block_size: int) -> tuple[_Field, ...]:
    if isinstance(part, StatePart):
        conv = _Field(PlaneKind.CONV, part.conv_shape, part.conv_dtype, (CONTENT,))
        if part.recurrent_shape is None or part.recurrent_dtype is None:
            return (conv,)
        return conv, _Field(PlaneKind.STATE, part.recurrent_shape, part.recurrent_dtype, (CONTENT,))
    kinds = (PlaneKind.LATENT, PlaneKind.ROPE) if part.latent else (PlaneKind.KEY, PlaneKind.VALUE)
    axes = (TOKEN, CONTENT) if part.latent else (TOKEN, HEAD, CONTENT)
    return (
        _Field(kinds[0], (block_size, part.heads, part.key_width), part.key_dtype, axes),
        _Field(kinds[1], (block_size, part.heads, part.value_width), part.value_dtype, axes),
    )


def _storage(
    fields: dict[int, tuple[_Field, ...]], blocks: int, block_major: bool, device: torch.device
) -> dict[int, torch.Tensor]:
    """Bytes `[blocks, bytes of a block]` of each layer, apart or interleaved by block."""
    sizes = {layer: sum(field.nbytes for field in fields[layer]) for layer in fields}
    if not block_major:
        return {layer: torch.zeros(blocks, size, dtype=torch.uint8, device=device) for layer, size in sizes.items()}
    whole = torch.zeros(blocks, sum(sizes.values()), dtype=torch.uint8, device=device)
    return dict(zip(sizes, whole.split(list(sizes.values()), dim=1), strict=True))


def _cut(row: torch.Tensor, fields: Iterable[_Field]) -> dict[PlaneKind, torch.Tensor]:
    """The tensors of one layer as views of its bytes."""
    tensors: dict[PlaneKind, Any] = {}
    at = 0
    for field in fields:
        payload = row[:, at : at + prod(field.shape) * field.dtype.itemsize]
        tensors[field.kind] = payload.view(field.dtype).unflatten(1, field.shape)
        at += field.nbytes
    return tensors


def _plane(layer: int, field: _Field, tensor: torch.Tensor) -> Plane:
    """The plane of one tensor; axes that may not be cut are joined into one."""
    seen = tensor
    if TOKEN not in field.axes:
        seen = tensor.flatten(1)
    elif HEAD not in field.axes:
        seen = tensor.flatten(2)
    return plane_of_tensor(
        name=f"layer {layer} {field.kind.value}",
        layer=layer,
        kind=field.kind,
        dtype=str(field.dtype).removeprefix("torch."),
        address=seen.data_ptr(),
        shape=tuple(seen.shape),
        strides=tuple(seen.stride()),
        axes=(BLOCK, *field.axes),
    )
