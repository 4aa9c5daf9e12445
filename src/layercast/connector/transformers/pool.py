"""What the engine asks of a pool of KV beyond its own blocks (`control.pool.Pool` is one), and one that keeps nothing.

The engine knows tokens and block numbers; keys, slots, leases and the movers behind a step are the pool's.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from layercast.control.pool import Match, Settled, Table
from layercast.flow.orders import LoadOrder, SaveOrder, StepOrders, StepReport
from layercast.flow.step import Step
from layercast.spec.groups import Layout
from layercast.spec.keys import ExtrasOf

Tables = Sequence[Table]


class KVPool(Protocol):
    """A pool of KV, seen from one engine. Called by one thread."""

    def match(self, tokens: Sequence[int], extras: ExtrasOf | None = None) -> Match:
        """Look up a prefix. Pure: repeats change nothing, and nothing is promised."""
        ...

    def bringing(self, request: str, tokens: Sequence[int], extras: ExtrasOf | None = None) -> bool:
        """Whether to look up this request later, as more may come to the pool from below; the first call asks for it.

        What comes is taken in by `reports`. Bounded by `layer_wait_ms`.
        """
        ...

    @property
    def busy_below(self) -> bool:
        """Whether anything moves between the pool and what lies below it."""
        ...

    def brought_up(self, request: str) -> bool:
        """Whether something has come up for a request."""
        ...

    def load_order(self, request: str, match: Match, tables: Tables) -> LoadOrder | None:
        """Promise the match to a request (a lease) and order its load; None when it is not there any more.

        A recurrent group's entry at index i is the block that takes the state after (i + 1) * block_size tokens.
        """
        ...

    def save_order(
        self,
        request: str,
        tokens: Sequence[int],
        before: int,
        after: int,
        tables: Tables,
        extras: ExtrasOf | None = None,
    ) -> SaveOrder | None:
        """Order the save of the blocks that a step from `before` to `after` tokens completes; None for nothing."""
        ...

    def begin(self, orders: StepOrders) -> Step:
        """Start the copies of one forward."""
        ...

    def settle(self, report: StepReport) -> Settled:
        """Take in a report: publish what was saved, end leases. Saves of a failed request are not published."""
        ...

    def reports(self, step: int, timeout_s: float = 0.0) -> Settled:
        """Settle what has ended since the last step, first waiting up to `timeout_s` until nothing is under way.

        Raises DeadlineExceeded, and then has settled nothing.
        """
        ...

    def abort(self, request: str) -> None:
        """Stop a request's copies; those under way are still reported."""
        ...

    def finish(self, request: str) -> None:
        """The request has ended; its saves go on."""
        ...


PoolFactory = Callable[[Layout], KVPool]
"""Makes the pool for an engine's memory, whose layout is known only once the engine has allocated it."""


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
    """The pool of an engine without one: finds nothing and keeps nothing."""

    def match(self, tokens: Sequence[int], extras: ExtrasOf | None = None) -> Match:
        """Nothing."""
        return Match(0, (), ())

    def bringing(self, request: str, tokens: Sequence[int], extras: ExtrasOf | None = None) -> bool:
        """Nothing comes."""
        return False

    @property
    def busy_below(self) -> bool:
        """Nothing."""
        return False

    def brought_up(self, request: str) -> bool:
        """Nothing."""
        return False

    def load_order(self, request: str, match: Match, tables: Tables) -> LoadOrder | None:
        """None."""
        return None

    def save_order(
        self,
        request: str,
        tokens: Sequence[int],
        before: int,
        after: int,
        tables: Tables,
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
