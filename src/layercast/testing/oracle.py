"""KV bytes as a pure function of what they stand for, so that any wrong layer, token, block or tenant is a wrong byte.

Public, for tests of backends and connectors. Does not know how bytes are moved.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from layercast.spec.dtypes import item_bytes
from layercast.spec.groups import Group, GroupSpec, Layout, layout_of
from layercast.spec.planes import Plane, PlaneKind, plane_of_tensor

Bytes = npt.NDArray[np.uint8]


class ByteEngine:
    """An engine's cache without an engine: numpy arrays for every layer, registered as planes.

    token_bytes: K and V bytes of one token in one layer. block_major: all layers of a block lie together.
    dtype: what the bytes are said to be.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        blocks: int,
        token_bytes: int = 24,
        block_major: bool = False,
        dtype: str = "uint8",
    ) -> None:
        self.arrays: dict[int, Bytes] = {}
        planes: list[Plane] = []
        for spec in specs:
            size = spec.block_size * token_bytes
            if block_major:
                memory = np.zeros((blocks, len(spec.layers), size), np.uint8)
                views = {layer: memory[:, at] for at, layer in enumerate(spec.layers)}
            else:
                views = {layer: np.zeros((blocks, size), np.uint8) for layer in spec.layers}
            self.arrays.update(views)
            planes += [_plane(layer, view, dtype) for layer, view in views.items()]
        self.layout: Layout = layout_of(specs, planes)

    def group(self, index: int) -> Group:
        """One of the groups."""
        return self.layout.groups[index]

    def write(self, layer: int, block: int, prefix: Sequence[int], salt: str = "") -> None:
        """Fill one block of one layer with the bytes that belong to the tokens up to its end."""
        array = self.arrays[layer]
        array[block] = content(prefix, layer, array.shape[1], salt)

    def holds(self, layer: int, block: int, prefix: Sequence[int], salt: str = "") -> bool:
        """Whether one block of one layer has exactly the bytes that belong there."""
        array = self.arrays[layer]
        return bool(np.array_equal(array[block], content(prefix, layer, array.shape[1], salt)))


def content(prefix: Sequence[int], layer: int, nbytes: int, salt: str = "") -> Bytes:
    """The bytes of a block whose last token is the last of `prefix`, uint8 [nbytes]."""
    seed = blake2b(repr((tuple(prefix), layer, salt)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(seed, "little")).integers(0, 256, nbytes, dtype=np.uint8)


def _plane(layer: int, view: Bytes, dtype: str) -> Plane:
    (blocks, size), stride, item = view.shape, view.strides[0], item_bytes(dtype)
    shape, strides, axes = (blocks, size // item), (stride // item, 1), ("block", "content")
    return plane_of_tensor(f"layers.{layer}.kv", layer, PlaneKind.KV, dtype, view.ctypes.data, shape, strides, axes)
