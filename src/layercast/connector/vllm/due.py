"""What goes to the workers with the next step, and vLLM's block tables as the pool reads them.

Does not know requests, nor why something moves.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from layercast.connector.vllm.metadata import Orders
from layercast.control.tables import Table
from layercast.flow.orders import LoadOrder, SaveOrder, StepOrders, TierOrder
from layercast.spec.groups import GroupKind, GroupSpec


class Due:
    """What goes to the workers with the next step."""

    def __init__(self, steps: "count[int] | None" = None) -> None:
        self.steps = steps or count()
        self._waited = 0
        """Steps that the first of its saves has waited for others."""
        self._step: int | None = None
        self.loads: list[LoadOrder] = []
        self.background: list[LoadOrder] = []
        self.saves: list[SaveOrder] = []
        self.joins: list[str] = []
        self.aborts: list[str] = []
        self.tier: list[TierOrder] = []
        self.lost_blocks: set[int] = set()
        self.lost_requests: set[str] = set()
        self.misled: set[str] = set()

    @property
    def empty(self) -> bool:
        """Whether there is nothing."""
        return not (
            self.loads
            or self.saves
            or self.background
            or self.joins
            or self.aborts
            or self.tier
            or self.lost_blocks
            or self.lost_requests
        )

    def then(self, patience: int, few: int) -> "Due":
        """What the step after this one has due so far: this one's saves, for `patience` steps at most, where each is of
        a few blocks, as more are worth moving beside the forward that computes them.

        Handing saves over costs much the same whether they are one or many.
        """
        if self.empty:
            return self
        after = Due(self.steps)
        may_wait = self.saves and self._waited < patience
        if may_wait and all(len(pair.slots) <= few for save in self.saves for pair in save.pairs):
            after.saves, self.saves, after._waited = self.saves, [], self._waited + 1
        return after

    def orders(self, *, loads_alone: bool = False) -> Orders:
        """All that there is by now, or its loads alone, early then, under the next step's number."""
        if self._step is None:
            self._step = next(self.steps)
        orders = StepOrders(
            self._step,
            tuple(self.loads),
            () if loads_alone else tuple(self.saves),
            background=tuple(self.background),
            aborts=tuple(self.aborts),
            joins=tuple(self.joins),
            tier=() if loads_alone else tuple(self.tier),
        )
        misled = tuple(sorted(self.misled))
        return Orders(orders, frozenset(self.lost_blocks), frozenset(self.lost_requests), misled, loads_alone)


def tables_of(block_ids: Sequence[Sequence[int]]) -> list[Table]:
    """Block tables by group; vLLM's block 0 is the null block."""
    return [ids if all(ids) else [block or None for block in ids] for ids in block_ids]


def table_to_save(
    spec: GroupSpec, group: int, block_ids: Sequence[Sequence[int]], offers: Iterable[tuple[int, int, int]]
) -> Table:
    """The table that a group's saves are read from. offers: as `snapshots_of`."""
    if spec.kind is GroupKind.RECURRENT:
        return snapshots_of(spec, group, offers)
    return block_ids[group] if spec.kind is GroupKind.FULL else [block or None for block in block_ids[group]]


def snapshots_of(spec: GroupSpec, group: int, offers: Iterable[tuple[int, int, int]]) -> Table:
    """Where vLLM leaves a recurrent group's states at block boundaries in this step, by (group, block, tokens)."""
    at = {
        tokens // spec.block_size - 1: block
        for owner, block, tokens in offers
        if owner == group and block and tokens % spec.block_size == 0
    }
    return [at.get(index) for index in range(max(at, default=-1) + 1)]
