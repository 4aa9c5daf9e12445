"""Blocks that vLLM has freed while forwards that use them may be under way: what fills them again waits for these.

vLLM frees a request's blocks when it hears of its last token, and by then another forward with it may have been queued.
Does not know requests, or how copies wait.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from layercast.flow.orders import LoadOrder


class Freed:
    """Takes note of all that one block pool frees. steps: those in flight, at most, once another one is ordered."""

    def __init__(self, pool: BlockPool, steps: int) -> None:
        self._pool, self._free = pool, pool.free_blocks
        self._lately: deque[list[KVCacheBlock]] = deque([[]], maxlen=steps)
        """By step, the last one that is still to be ordered."""
        self._resting: deque[list[KVCacheBlock]] = deque([[]])
        pool.free_blocks = self._freeing

    def _freeing(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        self._lately[-1] += blocks
        self._free(blocks)

    def step(self, loads: Sequence[LoadOrder]) -> bool:
        """A forward is ordered. Whether none of these loads fills a block that one under way may still use."""
        freed = [block.block_id for blocks in self._lately for block in blocks] if loads else []
        apart = all(load.blocks.isdisjoint(freed) for load in loads)
        self._lately.append([])
        self._resting.append([])
        if len(self._resting) > (self._lately.maxlen or 1):
            self._free(self._resting.popleft())
        return apart

    def rest(self, blocks: Iterable[int]) -> None:
        """Its blocks, in order, are about to be freed by a request that ends. Those that vLLM would hand out next stay
        until the forwards under way have ended, or the next load would have to wait for these."""
        if not self._pool.enable_caching:  # it would hand out any of them next
            return
        last = list[KVCacheBlock]()
        for block in map(self._pool.blocks.__getitem__, blocks):
            if block.block_hash is not None or block.is_null:
                break
            last.append(block)
        self._pool.touch(last)
        self._resting[-1] += last

    def relinquish(self) -> None:
        """Let go of what rests: the engine is idle."""
        for blocks in self._resting:
            self._freeing(blocks)
            blocks.clear()
