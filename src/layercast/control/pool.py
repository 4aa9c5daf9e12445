"""The embedded pool: an engine's scheduler side (keys, leases, slots) over its worker side (copies), in one process.

Its methods belong to the engine's thread. Knows block numbers and tokens, never tensors or attention.
"""

from collections.abc import Sequence

from layercast.control.backing import Backing
from layercast.control.directory import Directory
from layercast.control.scheduler import SchedulerSide, Settled
from layercast.flow.layer_step import LayerStep
from layercast.flow.orders import StepOrders, StepReport
from layercast.flow.worker import Worker
from layercast.spec.groups import Layout
from layercast.spec.keys import ExtrasOf, Identity


class Pool(SchedulerSide):
    """Look up, load and save a prompt's KV. Open one with `control.node.open_pool`."""

    def __init__(
        self,
        worker: Worker,
        directory: Directory,
        engine: Layout,
        identities: Sequence[Identity],
        backing: Backing | None = None,
    ) -> None:
        specs, sizes = [group.spec for group in engine.groups], [group.block_bytes for group in engine.groups]
        super().__init__(directory, worker.ways.config, specs, identities, block_bytes=sizes, backing=backing)
        self.worker = worker
        self._asked_s: dict[str, float] = {}
        """When each live request was first looked for below the slab."""

    def begin(self, orders: StepOrders) -> LayerStep:
        """Start the step's copies."""
        return self.worker.begin(orders)

    def reports(self, step: int, timeout_s: float = 0.0) -> Settled:
        """Settle what has ended since the last step, first waiting up to `timeout_s` for what is under way.

        Raises DeadlineExceeded, and then has settled nothing.
        """
        if timeout_s:
            self.backing.wait(timeout_s)
            self._pass_on()
            self.worker.quiet(timeout_s)
        return self.settle(self.worker.report(step))

    def settle(self, report: StepReport, rank: int = 0) -> Settled:
        """See `SchedulerSide.settle`. What follows from it below the slab is ordered at once."""
        settled = super().settle(report, rank)
        self._pass_on()
        return settled

    def bringing(self, request: str, tokens: Sequence[int], extras: ExtrasOf | None = None) -> bool:
        """Whether to ask again for a request, as blocks may be on their way up; the first call looks for them."""
        if not self.backing.there:
            return False
        if request not in self._asked_s:
            self._asked_s[request] = self.directory.clock()
            self.seek(request, tokens, extras)
        self._pass_on()
        late = self.directory.clock() > self._asked_s[request] + self.config.layer_wait_ms / 1000
        return not late and self.rising(request, bool(self.match(tokens, extras, request=request).coming))

    def brought_up(self, request: str) -> bool:
        """Whether blocks have come from below the slab for a live request."""
        return self.backing.fetched(request)

    @property
    def busy_below(self) -> bool:
        """Whether anything moves, or is looked for, below the slab."""
        return self.backing.busy

    def finish(self, request: str) -> None:
        """See `SchedulerSide.finish`."""
        super().finish(request)
        self._asked_s.pop(request, None)

    def _pass_on(self) -> None:
        self.worker.start(self.backing.orders())

    def abort(self, request: str) -> None:
        """Stop a request's copies. Its blocks are quiet once their outcomes have been settled."""
        self.worker.abort(request)
        self.finish(request)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and every lease and reservation has ended."""
        return self.worker.idle and super().idle and not self.busy_below
