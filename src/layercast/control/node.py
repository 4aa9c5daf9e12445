"""Puts a pool together for an engine: slab, mover, gates and worker; directory. Owns what must be closed.

The only room that names a concrete backend.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from layercast.config import Config
from layercast.control.directory import Directory
from layercast.control.pool import Pool
from layercast.control.scheduler import SchedulerSide, WorkerFacts
from layercast.errors import LayoutMismatch
from layercast.flow.batches import Ways
from layercast.flow.worker import NO_PEERS, Peers, Worker
from layercast.move.base import Mover
from layercast.move.cpu import CpuMover
from layercast.move.gates import CpuGate
from layercast.move.paced import PacedMover
from layercast.observe.timeline import OFF, Timeline
from layercast.spec.groups import Layout
from layercast.spec.keys import Identity
from layercast.store.slab import Slab

CLOSE_S = 10.0


@contextmanager
def open_worker(
    engine: Layout,
    config: Config,
    *,
    keep: Sequence[object] = (),
    link_gbps: float | None = None,
    peers: Peers = NO_PEERS,
    timeline: Timeline = OFF,
) -> Iterator[Worker]:
    """One rank's worker, for an engine whose caches are registered as `engine`.

    keep: what holds the engine's memory. link_gbps: pace copies to that
    many gigabits a second, to see overlap on a machine whose memory is faster than any link. Ends with everything
    landed and unmapped; raises DeadlineExceeded if that takes over CLOSE_S seconds.
    """
    slab = Slab.create(engine, config.host_bytes)
    mover: Mover = CpuMover() if link_gbps is None else PacedMover(CpuMover(), link_gbps)
    try:
        yield Worker(Ways.between(engine, slab, config), mover, CpuGate(), peers, keep, timeline)
    finally:
        mover.close(CLOSE_S)
        slab.close()


def scheduler_side(
    facts: Sequence[WorkerFacts], config: Config, shared_blocks: bool, in_forward: bool = True
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
    return SchedulerSide(directory, config, first.specs, first.identities, shared_blocks, sizes, in_forward)


@contextmanager
def open_pool(
    engine: Layout,
    identities: Sequence[Identity],
    config: Config,
    *,
    keep: Sequence[object] = (),
    link_gbps: float | None = None,
    peers: Peers = NO_PEERS,
    timeline: Timeline = OFF,
) -> Iterator[Pool]:
    """Both sides in one process, for an engine of one rank. identities: one a group; the rest as `open_worker`."""
    with open_worker(engine, config, keep=keep, link_gbps=link_gbps, peers=peers, timeline=timeline) as worker:
        directory = Directory(worker.ways.slots, time.monotonic, config.lease_s)
        yield Pool(worker, directory, engine, identities)
