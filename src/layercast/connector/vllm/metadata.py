"""layercast's values inside the envelopes that vLLM carries between its scheduler and its workers."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from layercast.control.scheduler import WorkerFacts
from layercast.flow.orders import StepOrders, StepReport


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker has registered; once, from each worker to the scheduler."""

    facts: WorkerFacts


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):
    """What to move during a step, from the scheduler to every worker; None: nothing.

    lost_blocks, lost_requests: promised to a forward, or to a waiting request, and gone before they could be leased.
    misled: requests that read the lost blocks in this forward. early: whether loads may begin before vLLM prepares the
    step's inputs, as nothing that it does then touches their blocks.
    """

    orders: StepOrders | None = None
    lost_blocks: frozenset[int] = frozenset()
    lost_requests: frozenset[str] = frozenset()
    misled: tuple[str, ...] = ()
    early: bool = False


NOTHING = Orders()
"""The metadata of every step without work."""


@dataclass(frozen=True)
class Reports(KVConnectorWorkerMetadata):
    """(rank, what ended on it); from the workers to the scheduler, joined over the ranks on the way.

    facts: (rank, what it has registered), with its first report.
    """

    reports: tuple[tuple[int, StepReport], ...]
    facts: tuple[tuple[int, WorkerFacts], ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Reports":
        """Both together."""
        assert isinstance(other, Reports)
        return Reports(self.reports + other.reports, self.facts + other.facts)


NO_REPORTS = Reports(())
