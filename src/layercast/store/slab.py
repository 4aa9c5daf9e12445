"""Host memory of the pool for one rank: `[layer][slot][block bytes]` for each group, taken once and faulted in.

Does not know which slots are in use, keys, leases or how bytes get here.
"""

import errno
import mmap
from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from layercast.errors import BadBlocks, OutOfMemory, Refused
from layercast.spec.groups import Group, GroupKind, Layout, packed_like
from layercast.store.free import memory_free

Digests = npt.NDArray[np.uint64]

SNAPSHOT_TOKENS = 256
"""A recurrent snapshot is as large as the KV of many blocks, and few positions are worth one."""
ALIGNMENT = 64
DIGEST_BYTES = 8
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE (Linux 5.14): faults pages in without changing what they hold
_SLICE = 64 << 20


class Slab:
    """One anonymous mapping and the digests of what its slots hold.

    layout: the engine's groups with slots for blocks, at addresses in this mapping. digests: for each group uint64
    [layers, slots], layers as in `group.layers`. owner: keep it alive for as long as an address of it is in use.
    """

    __slots__ = ("_base", "digests", "layout", "nbytes", "owner")

    def __init__(self, layout: Layout, slots: tuple[int, ...], owner: mmap.mmap) -> None:
        self.owner = owner
        self._base = np.frombuffer(owner, np.uint8).ctypes.data
        self.layout = _placed(layout, slots, self._base)
        self.digests: tuple[Digests, ...] = tuple(
            np.zeros((len(group.layers), count), np.uint64) for group, count in zip(layout.groups, slots, strict=True)
        )
        self.nbytes = len(owner) + sum(digests.nbytes for digests in self.digests)
        """Bytes of the mapping and the digests: at most the `host_bytes` asked for."""

    @classmethod
    def create(cls, layout: Layout, host_bytes: int) -> "Slab":
        """A slab of at most `host_bytes` for the engine's `layout`; every page is in memory when it returns.

        Raises Refused when not one block of each group fits, OutOfMemory when the machine can't give that much.
        """
        slots = slots_for(layout, host_bytes)
        _check_memory(host_bytes)
        size = _mapping_bytes(layout.groups, slots)
        try:
            owner = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _out_of_memory(size, error) from error
        try:
            _fault_in(owner)
        except OSError as error:
            owner.close()
            raise _out_of_memory(size, error) from error
        return cls(layout, slots, owner)

    @property
    def slots(self) -> tuple[int, ...]:
        """Number of slots of each group."""
        return tuple(group.blocks for group in self.layout.groups)

    def view(self, group: int, slot: int, layer: int) -> memoryview:
        """The bytes of one layer of one slot, in place. Release it before the slab is closed."""
        return memoryview(self.owner)[self._range(group, slot, layer)]

    def read(self, group: int, slot: int, layer: int) -> bytes:
        """The bytes of one layer of one slot. For tools and tests."""
        return self.owner[self._range(group, slot, layer)]

    def write(self, group: int, slot: int, layer: int, data: bytes) -> None:
        """Replace the bytes of one layer of one slot (its digest stays). For tools and tests."""
        self.owner[self._range(group, slot, layer)] = data

    def close(self) -> None:
        """Unmap the memory. Nothing may be moving into or out of it; a second call changes nothing."""
        self.owner.close()

    def _range(self, group: int, slot: int, layer: int) -> slice:
        owner = self.layout.groups[group]
        if not 0 <= slot < owner.blocks:
            raise BadBlocks(f"{owner.name}: slot {slot} is outside [0, {owner.blocks})")
        nbytes = owner.layer_bytes(layer)
        first = owner.planes_of(layer)[0]
        start = first.base - self._base + slot * first.block_stride
        return slice(start, start + nbytes)


def slots_for(layout: Layout, host_bytes: int) -> tuple[int, ...]:
    """How many slots each group gets, so that all of them cover the same number of tokens.

    A block of a full, latent or window group covers `block_size` tokens (a window group keeps all of them, since a hit
    may end at any block); a recurrent snapshot covers at least SNAPSHOT_TOKENS. Each group gets at least one slot, and
    the coverage is the largest that fits `host_bytes`, digests and page rounding included.
    Raises Refused when one slot of each group does not fit.
    """
    tokens = tuple(tokens_per_slot(group) for group in layout.groups)
    least = slab_bytes(layout, (1,) * len(tokens))
    if not tokens or host_bytes < least:
        raise Refused(
            f"host_bytes = {host_bytes}: one block of each of the {len(tokens)} groups needs {least}; raise host_bytes"
        )
    too_many = max(tokens) * (host_bytes // min(group.block_bytes for group in layout.groups) + 1)
    covers = range(1, too_many)
    most = bisect_right(covers, host_bytes, key=lambda cover: slab_bytes(layout, _coverage(cover, tokens)))
    return _coverage(covers[most - 1], tokens)


def tokens_per_slot(group: Group) -> int:
    """Tokens that one slot of a group stands for when memory is shared out."""
    size = group.spec.block_size
    return max(size, SNAPSHOT_TOKENS) if group.spec.kind is GroupKind.RECURRENT else size


def slab_bytes(layout: Layout, slots: tuple[int, ...]) -> int:
    """Bytes that a slab with so many slots takes: its mapping in whole pages, and its digests."""
    digests = sum(len(group.layers) * count for group, count in zip(layout.groups, slots, strict=True))
    return _mapping_bytes(layout.groups, slots) + DIGEST_BYTES * digests


def _coverage(tokens: int, tokens_per_slot: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-tokens // size) for size in tokens_per_slot)


def _mapping_bytes(groups: tuple[Group, ...], slots: tuple[int, ...]) -> int:
    total = sum(
        _rounded(group.layer_bytes(layer) * count, ALIGNMENT)
        for group, count in zip(groups, slots, strict=True)
        for layer in group.layers
    )
    return _rounded(total, mmap.PAGESIZE)


def _placed(layout: Layout, slots: tuple[int, ...], base: int) -> Layout:
    """The groups one after the other from `base` on, each layer's slots together.

    Where the engine has all layers of a block together, so has a slot, in the same order: a window of several layers
    is one piece a block only if it is so on both sides.
    """
    groups = []
    for group, count in zip(layout.groups, slots, strict=True):
        bases, stride, end = {}, None, base
        if group.block_major:
            stride, end = group.block_bytes, base + _rounded(group.block_bytes * count, ALIGNMENT)
            for layer in sorted(group.layers, key=lambda layer: group.planes_of(layer)[0].base):
                bases[layer], base = base, base + group.layer_bytes(layer)
        else:
            for layer in group.layers:
                bases[layer], end = end, end + _rounded(group.layer_bytes(layer) * count, ALIGNMENT)
        base = end
        groups.append(packed_like(group, bases, count, stride))
    return Layout(tuple(groups))


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _fault_in(memory: mmap.mmap) -> None:
    """Have every page in memory now, so that no save pays for it and a refusal comes here. Raises OSError."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(memory, mmap.MADV_HUGEPAGE, 0, len(memory))
    for start in range(0, len(memory), _SLICE):
        length = min(_SLICE, len(memory) - start)
        if not _advise(memory, _POPULATE_WRITE, start, length):
            np.frombuffer(memory, np.uint8)[start : start + length : mmap.PAGESIZE] = 0


def _advise(memory: mmap.mmap, advice: int, start: int, length: int) -> bool:
    """Whether the kernel knows this advice. Raises OSError where it knows it and has no memory."""
    try:
        memory.madvise(advice, start, length)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def _check_memory(host_bytes: int) -> None:
    """Refuse what the kernel would promise now and kill for later. Raises OutOfMemory."""
    free = memory_free()
    if free is not None and host_bytes > free:
        raise OutOfMemory(
            f"host_bytes = {host_bytes}, but only {free} bytes of memory are available now; "
            "lower host_bytes or free memory"
        )


def _out_of_memory(size: int, error: OSError) -> OutOfMemory:
    return OutOfMemory(f"the system refused {size} bytes of host memory ({error.strerror}); lower host_bytes")
