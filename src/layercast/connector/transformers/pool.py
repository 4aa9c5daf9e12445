"""The pool of an engine that has none: it finds nothing and keeps nothing.

With one, the engine asks `control.pool.Pool`: it knows tokens and block numbers; keys, slots, leases and the movers
behind a step are the pool's.
"""

from collections.abc import Callable, Sequence

from layercast.control.pool import Match, Pool, Settled, Table
from layercast.flow.orders import LoadOrder, SaveOrder, StepOrders, StepReport
from layercast.flow.step import Step
from layercast.spec.groups import Layout
from layercast.spec.keys import ExtrasOf


class _FreeStep:
    """A step that moves nothing."""

    def __init__(self, step: int) -> None:
        self._step = step

    def wait(self, layer: int) -> None:
        """No gate."""

    def written(self, layer: int) -> None:
        """No hand-off."""

    def end(self) -> StepReport:
        """An empty report."""
        return StepReport(self._step)


class NoPool:
    """What of `Pool` an engine calls."""

    busy_below = False

    def match(self, tokens: Sequence[int], extras: ExtrasOf | None = None) -> Match:
        """Nothing."""
        return Match(0, (), ())

    def bringing(self, request: str, tokens: Sequence[int], extras: ExtrasOf | None = None) -> bool:
        """Nothing comes."""
        return False

    def brought_up(self, request: str) -> bool:
        """Nothing."""
        return False

    def load_order(self, request: str, match: Match, tables: Sequence[Table]) -> LoadOrder | None:
        """None."""
        return None

    def save_order(
        self,
        request: str,
        tokens: Sequence[int],
        before: int,
        after: int,
        tables: Sequence[Table],
        extras: ExtrasOf | None = None,
    ) -> SaveOrder | None:
        """None."""
        return None

    def begin(self, orders: StepOrders) -> Step:
        """A step that moves nothing."""
        return _FreeStep(orders.step)

    def settle(self, report: StepReport) -> Settled:
        """Nothing ended."""
        return Settled((), (), ())

    def reports(self, step: int, timeout_s: float = 0.0) -> Settled:
        """Nothing ended."""
        return Settled((), (), ())

    def abort(self, request: str) -> None:
        """Nothing to stop."""

    def finish(self, request: str) -> None:
        """Nothing to forget."""


KVPool = Pool | NoPool
PoolFactory = Callable[[Layout], KVPool]
"""Makes the pool for an engine's memory, whose layout is known only once the engine has allocated it."""
