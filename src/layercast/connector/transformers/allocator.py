"""Which blocks are free, and how many hold each of the others. Does not know tensors or why a block is held."""

import heapq
from collections.abc import Iterable, Sequence

from layercast.errors import BadBlocks


class BlockAllocator:
    """Blocks `first .. first + count - 1` with a reference count each; lowest ids go first, so that they form runs."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))
        self._held: dict[int, int] = {}
        self.count = count

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each held once. Raises BadBlocks when there are not as many: ask `free` first."""
        if count > len(self._free):
            raise BadBlocks(f"{count} blocks wanted, {len(self._free)} of {self.count} are free")
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self._held.update(dict.fromkeys(blocks, 1))
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference on each block. Raises BadBlocks for a block that nobody holds."""
        for block in blocks:
            if block not in self._held:
                raise BadBlocks(f"block {block} is not held by anybody, so its content is nobody's")
            self._held[block] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """One reference less on each block; those that became free. Raises BadBlocks for a block that nobody holds."""
        freed = []
        for block in blocks:
            if block not in self._held:
                raise BadBlocks(f"block {block} is released more often than it was held")
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
                heapq.heappush(self._free, block)
                freed.append(block)
        return freed

    def references(self) -> dict[int, int]:
        """References of every held block."""
        return dict(self._held)
