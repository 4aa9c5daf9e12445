"""The tier under the slab: slots are written behind to a store, and read back before a request needs them.

One thread for each direction, so that nobody who waits for bytes waits behind bytes that nobody waits for; neither is
ever the engine's. An object is the layers of one block of one group, as they lie in the slab, in order. Does not know
what a key means, nor which blocks are worth it.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

import xxhash

from layercast.errors import Corrupt, DeadlineExceeded, LayercastError, Missing
from layercast.flow.batches import SlabMemory
from layercast.flow.orders import KeyedSlots, TierOrder, TierOutcome
from layercast.sidethread import SideThread
from layercast.store.base import Store

_log = logging.getLogger("layercast")


class SlotMemory(SlabMemory, Protocol):
    """The slab, whose slots can be read and written here."""

    def view(self, group: int, slot: int, layer: int) -> memoryview:
        """The bytes of one layer of one slot, in place."""
        ...


class Tier:
    """Copies between a slab and `store`. Its methods belong to one thread, but for `close` they never block.

    verify: whether the slab's digests are kept: then what is written behind is compared with them.
    """

    def __init__(self, slab: SlotMemory, store: Store, lease_s: float, verify: bool) -> None:
        self._slab = slab
        self._store = store
        self._lease_s = lease_s
        self._verify = verify
        self._fetching = SideThread("layercast-fetch")
        self._spilling = SideThread("layercast-spill")
        self._jobs: list[tuple[TierOrder, Future[tuple[int, float]]]] = []
        self._said = ""
        """What was last said to keep slots from being written."""

    def begin(self, order: TierOrder) -> None:
        """Start an order; its slots are its own until its outcome is taken."""
        side, job = (self._fetching, self._fetched) if order.fetch else (self._spilling, self._spilled)
        self._jobs.append((order, side.submit(self._timed, order, job)))

    def ended(self) -> tuple[TierOutcome, ...]:
        """What has ended since the last call."""
        over = [(order, job) for order, job in self._jobs if job.done()]
        if over:
            self._jobs = [(order, job) for order, job in self._jobs if not job.done() or (order, job) not in over]
        outcomes = tuple(_outcome(order, job) for order, job in over)
        for outcome in outcomes:
            if not outcome.fetch:
                self._say(outcome.reason)
        return outcomes

    @property
    def idle(self) -> bool:
        """Whether every outcome has been taken."""
        return not self._jobs

    def wait(self, timeout_s: float) -> None:
        """Block until all that was begun has ended. Raises DeadlineExceeded."""
        left = wait([job for _, job in self._jobs if not job.cancelled()], timeout_s).not_done
        if left:
            raise DeadlineExceeded(f"{len(left)} orders to the store below have not ended within {timeout_s:g} s")

    def close(self, timeout_s: float) -> None:
        """End both threads; orders that have not begun never do. Raises DeadlineExceeded if one does not end."""
        for side in (self._fetching, self._spilling):
            side.close(drop=True)
        self.wait(timeout_s)
        for side in (self._fetching, self._spilling):
            side.join()
        self._store.close()

    def _say(self, reason: str) -> None:
        """Warn of what keeps slots from being written, once until some are, or something else does."""
        if reason and reason != self._said:
            _log.warning("not kept below the slab: %s", reason)
        self._said = reason

    def _timed(self, order: TierOrder, job: Callable[[KeyedSlots], int]) -> tuple[int, float]:
        start_s = time.perf_counter()
        return sum(job(blocks) for blocks in order.blocks), time.perf_counter() - start_s

    def _spilled(self, blocks: KeyedSlots) -> int:
        """Write what the store does not have; the bytes written."""
        ranges, nbytes = self._ranges(blocks.group)
        there = self._store.present(blocks.keys)
        todo = [(key, slot) for key, slot, has in zip(blocks.keys, blocks.slots, there, strict=True) if not has]
        for key, slot in todo:
            with self._store.open_write([key], [nbytes]) as handle:
                for row, (layer, offset) in enumerate(ranges):
                    with self._slab.view(blocks.group, slot, layer) as data:
                        handle.write(0, offset, data)
                        intact = not self._verify or _digest(data) == self._slab.digests[blocks.group][row, slot]
                    if not intact:
                        raise Corrupt(f"layer {layer} of slot {slot} is not what was saved; it is not written behind")
                handle.commit()
        return len(todo) * nbytes

    def _fetched(self, blocks: KeyedSlots) -> int:
        """Bring objects into their slots, with digests of what was read; the bytes read."""
        ranges, nbytes = self._ranges(blocks.group)
        with self._store.open_read(blocks.keys, self._lease_s) as handle:
            if any(size != nbytes for size in handle.sizes):
                raise Missing(f"objects of {sorted(set(handle.sizes))} bytes where a block has {nbytes}; recompute")
            for index, slot in enumerate(blocks.slots):
                for row, (layer, offset) in enumerate(ranges):
                    with self._slab.view(blocks.group, slot, layer) as data:
                        handle.read(index, offset, data)
                        if self._verify:
                            self._slab.digests[blocks.group][row, slot] = _digest(data)
        return len(blocks.slots) * nbytes

    def _ranges(self, group: int) -> tuple[list[tuple[int, int]], int]:
        """(layer, where it begins in an object) of each layer of a group, and an object's bytes."""
        owner, at = self._slab.layout.groups[group], 0
        ranges = []
        for layer in owner.layers:
            ranges.append((layer, at))
            at += owner.layer_bytes(layer)
        return ranges, at


def _digest(data: memoryview) -> int:
    """The digest that movers take of what they save."""
    return int(xxhash.xxh3_64_intdigest(data))


def _outcome(order: TierOrder, job: "Future[tuple[int, float]]") -> TierOutcome:
    error = None if job.cancelled() else job.exception()
    if error is None and not job.cancelled():
        return TierOutcome(order.id, order.fetch, True, *job.result())
    if error is not None and not isinstance(error, LayercastError):
        _log.error("an order to the store below raised; please report this", exc_info=error)
    return TierOutcome(order.id, order.fetch, False, 0, 0.0, str(error or "cancelled"))
