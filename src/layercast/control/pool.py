"""The embedded pool: an engine's scheduler side (keys, leases, slots) over its worker side (copies), in one process.

Its methods belong to the engine's thread. Knows block numbers and tokens, never tensors or attention.
"""

from collections.abc import Sequence

from layercast.control.directory import Directory
from layercast.control.scheduler import Match, SchedulerSide, Settled, Table
from layercast.flow.orders import StepOrders
from layercast.flow.worker import LayerStep, Worker
from layercast.spec.groups import Layout
from layercast.spec.keys import Identity

__all__ = ["Match", "Pool", "Settled", "Table"]


class Pool(SchedulerSide):
    """Look up, load and save a prompt's KV. Open one with `control.node.open_pool`."""

    def __init__(self, worker: Worker, directory: Directory, engine: Layout, identities: Sequence[Identity]) -> None:
        specs, sizes = [group.spec for group in engine.groups], [group.block_bytes for group in engine.groups]
        super().__init__(directory, worker.ways.config, specs, identities, block_bytes=sizes)
        self.worker = worker

    def begin(self, orders: StepOrders) -> LayerStep:
        """Start the step's copies."""
        return self.worker.begin(orders)

    def reports(self, step: int, timeout_s: float = 0.0) -> Settled:
        """Settle what has ended since the last step, first waiting up to `timeout_s` for what is under way."""
        if timeout_s:
            self.worker.quiet(timeout_s)
        return self.settle(self.worker.report(step))

    def abort(self, request: str) -> None:
        """Stop a request's copies. Its blocks are quiet once their outcomes have been settled."""
        self.worker.abort(request)
        self.finish(request)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and every lease and reservation has ended."""
        return self.worker.idle and super().idle
