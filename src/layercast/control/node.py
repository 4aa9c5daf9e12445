"""Puts a pool together for an engine: slab, mover, gates and worker; directory. Owns what must be closed.

The only room that names a concrete backend.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from layercast.config import Config
from layercast.control.backing import Backing
from layercast.control.directory import Directory
from layercast.control.memory import CLOSE_S, open_memory
from layercast.control.pool import Pool
from layercast.control.scheduler import SchedulerSide, WorkerFacts
from layercast.errors import LayoutMismatch
from layercast.flow.batches import Ways
from layercast.flow.tier import Tier
from layercast.flow.worker import NO_PEERS, Worker
from layercast.observe.timeline import OFF, Timeline
from layercast.spec.groups import GroupSpec, Layout
from layercast.spec.keys import Identity
from layercast.store.base import Store
from layercast.store.folder import FolderStore


@contextmanager
def open_worker(
    engine: Layout,
    config: Config,
    *,
    keep: Sequence[object] = (),
    link_gbps: float | None = None,
    timeline: Timeline = OFF,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[Worker]:
    """One rank's worker of `ranks`, for an engine whose caches are registered as `engine`.

    keep: what holds the engine's memory. link_gbps: pace copies to that many gigabits a second, to see overlap on a
    machine whose memory is faster than any link. Caches on a GPU are moved by it (see `memory`). Ends with everything
    landed and unmapped; raises DeadlineExceeded if that takes over CLOSE_S seconds.
    """
    with ExitStack() as closing:
        memory = open_memory(engine, config, link_gbps, closing)
        ways, tier = Ways.between(engine, memory.slab, config, on_device=memory.on_device, rank=rank), None
        if config.disk_path:
            tier = Tier(memory.slab, disk_of(config, rank, ranks), config.lease_s, ways.verify)
            closing.callback(tier.close, CLOSE_S)
        yield Worker(ways, memory.mover, memory.gate, NO_PEERS, keep, timeline, tier)


def disk_of(config: Config, rank: int, ranks: int) -> Store:
    """The folder of one rank: what another rank, or one of another number of ranks, holds of a block is another thing.

    Raises FolderLost.
    """
    return FolderStore(Path(config.disk_path).expanduser() / f"rank-{rank}-of-{ranks}", config.disk_bytes)


def _backing(directory: Directory, config: Config, specs: Sequence[GroupSpec]) -> Backing | None:
    if not config.disk_path:
        return None
    stores = [disk_of(config, rank, directory.ranks) for rank in range(directory.ranks)]
    return Backing(directory, stores, specs, config.kv_recompute_threshold)


def scheduler_side(
    facts: Sequence[WorkerFacts], config: Config, shared_blocks: bool, in_forward: bool = True, told_ahead: int = 1
) -> SchedulerSide:
    """The scheduler side over the workers of all ranks, in the order of their ranks. The rest as `SchedulerSide`.

    Raises LayoutMismatch where two ranks do not hold the same groups, layers and kind of content.
    """
    first = facts[0]
    for rank, other in enumerate(facts):
        if (other.specs, other.identities) != (first.specs, first.identities):
            raise LayoutMismatch(f"rank {rank} has registered other groups or contents than rank 0: {other.specs}")
    slots = [min(counts) for counts in zip(*(fact.slots for fact in facts), strict=True)]
    directory = Directory(slots, time.monotonic, config.lease_s, ranks=len(facts))
    sizes = [max(sizes) for sizes in zip(*(fact.block_bytes for fact in facts), strict=True)]
    backing = _backing(directory, config, first.specs)
    rules = in_forward, told_ahead
    return SchedulerSide(directory, config, first.specs, first.identities, shared_blocks, sizes, *rules, backing)


@contextmanager
def open_pool(
    engine: Layout,
    identities: Sequence[Identity],
    config: Config,
    *,
    keep: Sequence[object] = (),
    link_gbps: float | None = None,
    timeline: Timeline = OFF,
) -> Iterator[Pool]:
    """Both sides in one process, for an engine of one rank. identities: one a group; the rest as `open_worker`."""
    with open_worker(engine, config, keep=keep, link_gbps=link_gbps, timeline=timeline) as worker:
        directory = Directory(worker.ways.slots, time.monotonic, config.lease_s)
        pool = Pool(
            worker, directory, engine, identities, _backing(directory, config, [group.spec for group in engine.groups])
        )
        try:
            yield pool
        finally:
            pool.close(CLOSE_S)
