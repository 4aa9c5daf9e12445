"""Engine blocks that copies still read or write, held by reference count until every rank has reported.

So preemption, window trimming and finishing are all safe by one mechanism. While the engine is idle nothing is held:
its blocks count as free (`reset_prefix_cache` works), and whoever reuses one before its copy is reported is noticed.
Does not know requests, tokens or what the copies are for.
"""

from collections.abc import Callable, Iterable

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from layercast.flow.orders import LoadOrder, SaveOrder


class Holds:
    """References on one engine's block pool. reused: called with the id of an order whose blocks may have changed."""

    def __init__(self, pool: BlockPool, reused: Callable[[str], None]) -> None:
        self._pool = pool
        self._reused = reused
        self._held: dict[str, list[KVCacheBlock]] = {}
        self._watched: dict[str, set[int]] = {}
        """Order to its blocks that are no longer held."""

    def hold(self, order: LoadOrder | SaveOrder) -> None:
        """Keep an order's blocks from being handed out, until it is released."""
        blocks = [self._pool.blocks[block] for pair in order.pairs for block in pair.blocks]
        self._pool.touch(blocks)
        self._held[order.id] = blocks

    def release(self, orders: Iterable[str]) -> None:
        """Let go of the blocks of orders that have ended."""
        for order in orders:
            self._watched.pop(order, None)
            blocks = self._held.pop(order, None)
            if blocks is not None:
                self._pool.free_blocks(reversed(blocks))

    def relinquish(self) -> None:
        """The engine is idle: hold nothing, but see what is reused. Older block pools can't tell, so there we hold."""
        if not hasattr(self._pool, "unpin_blocks"):
            return
        for order, blocks in self._held.items():
            self._watched[order] = {block.block_id for block in blocks}
            self._pool.unpin_blocks(blocks, self._on_reuse)
        self._held.clear()

    @property
    def held(self) -> int:
        """Blocks held."""
        return sum(len(blocks) for blocks in self._held.values())

    def _on_reuse(self, block: KVCacheBlock) -> None:
        for order in [order for order, blocks in self._watched.items() if block.block_id in blocks]:
            del self._watched[order]
            self._reused(order)
