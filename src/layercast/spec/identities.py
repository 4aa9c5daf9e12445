"""Identities made from a registered layout, so that whatever changes the bytes of a block changes its keys.

Does not know models or engines beyond the names they give.
"""

from hashlib import sha256

from layercast.spec.groups import Group, Layout
from layercast.spec.keys import Identity
from layercast.spec.planes import Dim, Plane


def identities_of(
    layout: Layout,
    *,
    model: str,
    revision: str = "",
    weights_version: str = "",
    kv_scales: str = "",
    draft: str = "",
    packing: str = "",
) -> tuple[Identity, ...]:
    """One identity a group: the engine's names, and dtypes and inner layout as registered.

    packing: how an engine's kernels order a block's content, where its strides do not tell.
    """
    return tuple(
        Identity(
            model=model,
            revision=revision,
            weights_version=weights_version,
            dtypes=tuple(sorted({(str(plane.kind), plane.dtype) for plane in group.planes})),
            layout=f"{layout_tag(group)} {packing}".rstrip(),
            group=group.name,
            block_size=group.spec.block_size,
            kv_scales=kv_scales,
            draft=draft,
        )
        for group in layout.groups
    )


def layout_tag(group: Group) -> str:
    """A digest of how a block's content is ordered in each layer; addresses and gaps do not enter it."""
    facts = [
        (plane.layer, str(plane.kind), plane.dtype, [(dim.name, dim.size) for dim in _by_stride(plane)])
        for plane in group.planes
    ]
    return sha256(repr((str(group.spec.kind), group.spec.window, facts)).encode()).hexdigest()


def _by_stride(plane: Plane) -> list[Dim]:
    return sorted(plane.dims, key=lambda dim: (-dim.stride, -dim.size))
