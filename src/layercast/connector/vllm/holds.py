"""Engine blocks that copies still read or write, kept safe until every rank has reported.

What a load writes is held by reference count. What a save reads is held too, or, where vLLM's own prefix cache keeps
a freed block for as long as it can, it is only watched: one that is handed out before its copy was reported costs that
save, and `reset_prefix_cache`, sleep and pause find no block in use. While the engine is idle nothing is held.
Does not know requests, tokens or what the copies are for.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from layercast.flow.orders import BlockPairs


class Holds:
    """References on one engine's block pool. reused: called with the id of an order whose blocks may have changed."""

    def __init__(self, pool: BlockPool, reused: Callable[[str], None]) -> None:
        self._pool = pool
        self._reused = reused
        self._can_watch = hasattr(pool, "unpin_blocks")
        self._held: dict[str, list[KVCacheBlock]] = {}
        self._watched: dict[int, tuple[str, ...]] = {}
        """Block to the orders that read it without holding it."""
        self._watching: dict[str, set[int]] = {}

    def hold(self, order: str, pairs: Sequence[BlockPairs]) -> None:
        """Keep an order's blocks from being handed out, until it is released."""
        numbers = chain.from_iterable(pair.blocks for pair in pairs)
        blocks = list(map(self._pool.blocks.__getitem__, numbers))
        self._pool.touch(blocks)
        self._held[order] = blocks

    def keep(self, order: str, pairs: Sequence[BlockPairs]) -> None:
        """Keep the content of an order's blocks until it is released, or hear of it if it can't be kept."""
        self.hold(order, pairs)
        if self._can_watch and self._pool.enable_caching:
            self._watch(order, [block for block in self._held[order] if block.block_hash is not None])

    def release(self, orders: Iterable[str]) -> None:
        """Let go of the blocks of orders that have ended."""
        for order in orders:
            self._forget(order, self._watching.get(order, ()))
            self._watching.pop(order, None)
            blocks = self._held.pop(order, None)
            if blocks is not None:
                self._pool.free_blocks(reversed(blocks))

    def relinquish(self) -> None:
        """The engine is idle: hold nothing. Older block pools can't tell what is reused, so there we go on holding."""
        if self._can_watch:
            for order, blocks in self._held.items():
                self._watch(order, blocks)

    def resume(self) -> None:
        """The engine is not idle any more: hold again what it would hand out next."""
        for order, ids in self._watching.items():
            unused = [self._pool.blocks[block] for block in ids if order in self._watched.get(block, ())]
            soon = [block for block in unused if not self._lasts(block)]
            self._forget(order, [block.block_id for block in soon])
            self._pool.touch(soon)
            self._held.setdefault(order, []).extend(soon)

    def doubt(self, blocks: Iterable[int]) -> None:
        """Let nobody find these in vLLM's prefix cache any more."""
        if self._pool.enable_caching:
            self._pool.evict_blocks(set(blocks))

    @property
    def held(self) -> int:
        """Blocks held."""
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def free(self) -> int:
        """Blocks that vLLM may hand out."""
        return self._pool.get_num_free_blocks()

    def _lasts(self, block: KVCacheBlock) -> bool:
        """Whether vLLM, once nobody holds it, hands it out last: else it is the first to go."""
        return self._pool.enable_caching and block.block_hash is not None

    def _forget(self, order: str, blocks: Iterable[int]) -> None:
        """Watch these blocks of an order no more."""
        left, alone = self._watching.get(order, set()), (order,)
        for block in list(blocks):
            left.discard(block)
            if (orders := self._watched.pop(block, alone)) != alone:
                self._watched[block] = tuple(other for other in orders if other != order)

    def _watch(self, order: str, blocks: Sequence[KVCacheBlock]) -> None:
        ids = {block.block_id for block in blocks}
        self._held[order] = [block for block in self._held[order] if block.block_id not in ids]
        self._watching.setdefault(order, set()).update(ids)
        shared = self._watched.keys() & ids
        self._watched.update(dict.fromkeys(ids - shared, (order,)))
        for block in shared:
            self._watched[block] += (order,)
        self._pool.unpin_blocks(blocks, self._on_reuse)

    def _on_reuse(self, block: KVCacheBlock) -> None:
        if block.next_free_block is not None:  # vLLM's prefix cache was emptied, and nobody has been given the block
            self._pool.touch([block])
            self._pool.unpin_blocks([block], self._on_reuse)
            return
        for order in self._watched.pop(block.block_id, ()):
            self._reused(order)
