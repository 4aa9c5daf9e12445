"""Puts a pool together for one engine process: slab, mover, gates, worker, directory. Owns what must be closed.

The only room that names a concrete backend.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from layercast.config import Config
from layercast.control.directory import Directory
from layercast.control.pool import Pool
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
    """A pool for an engine whose caches are registered as `engine`.

    identities: one a group (see spec.identities). keep: what holds the engine's memory. link_gbps: pace copies to that
    many gigabits a second, to see overlap on a machine whose memory is faster than any link. Ends with everything
    landed and unmapped; raises DeadlineExceeded if that takes over CLOSE_S seconds.
    """
    slab = Slab.create(engine, config.host_bytes)
    mover: Mover = CpuMover() if link_gbps is None else PacedMover(CpuMover(), link_gbps)
    try:
        worker = Worker(Ways.between(engine, slab, config), mover, CpuGate(), peers, keep, timeline)
        directory = Directory(slab.slots, time.monotonic, config.lease_s)
        yield Pool(worker, directory, engine, identities)
    finally:
        mover.close(CLOSE_S)
        slab.close()
