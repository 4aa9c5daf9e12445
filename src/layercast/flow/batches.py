"""From an order to batches: which windows of which blocks are submitted together, and what is hashed on the way.

Does not know queues, gates or threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from layercast.config import Config
from layercast.flow.issue import Batch, Run
from layercast.flow.orders import BlockPairs, LoadOrder, SaveOrder
from layercast.flow.runs import Expected, LoadRun, SaveRun
from layercast.move.base import Digests, Flight
from layercast.plan.batches import batches_of_all, windows_of
from layercast.plan.pieces import CopyPlan, DigestRanges, Pieces, Route, route_between
from layercast.spec.groups import Layout

SAVE_PARTS = 8
"""In how many parts a device saves a step's layers."""
Part = tuple[Pieces, tuple[int, int]]
"""Pieces, and (bytes, copies) of them."""
Share = tuple[tuple[int, ...], list[Part]]
"""Layers of a window that one group has, and their parts."""


class SlabMemory(Protocol):
    """The slab as flow sees it: where slots lie, and the digests taken at saving."""

    @property
    def layout(self) -> Layout:
        """The engine's groups, whose blocks are slots."""
        ...

    @property
    def digests(self) -> Sequence[Digests]:
        """One array a group, [layers of the group, slots]."""
        ...


@dataclass(frozen=True, slots=True)
class Ways:
    """The routes between an engine's memory and a slab, in both directions, and how batches are cut.

    rows: for each group, the row of each layer in its digests. on_device: whether the engine's memory is a device's.
    stagger_s: how much later than the first rank's this one's loads start.
    """

    slab: SlabMemory
    config: Config
    layers: tuple[int, ...]
    saving: tuple[Route, ...]
    loading: tuple[Route, ...]
    rows: tuple[Mapping[int, int], ...]
    on_device: bool
    stagger_s: float = 0.0

    @staticmethod
    def between(engine: Layout, slab: SlabMemory, config: Config, *, on_device: bool = False, rank: int = 0) -> "Ways":
        """Routes between an engine's layout, whose memory may be a device's, and a slab. Raises LayoutMismatch."""
        pairs = list(zip(engine.groups, slab.layout.groups, strict=True))
        return Ways(
            slab,
            config,
            engine.layers,
            tuple(route_between(ours, theirs) for ours, theirs in pairs),
            tuple(route_between(theirs, ours) for ours, theirs in pairs),
            tuple({layer: row for row, layer in enumerate(group.layers)} for group in slab.layout.groups),
            on_device,
            rank * config.h2d_stagger_us / 1e6,
        )

    @property
    def verify(self) -> bool:
        """Whether what moves is hashed. What lies on a device is not: reading it back costs more than moving it."""
        return self.config.verify and not self.on_device

    @property
    def save_window(self) -> int:
        """Layers that are saved together, 0 for all. A device is handed a step's saves at its end, so that a few parts
        of it overlap with compute as well as a part a layer does, for less of the forward's time."""
        window = self.config.layerwise_window
        return max(window, -(-len(self.layers) // SAVE_PARTS)) if self.on_device and window else window

    @property
    def slots(self) -> tuple[int, ...]:
        """Number of slots of each group."""
        return tuple(group.blocks for group in self.slab.layout.groups)

    def load_plans(self, pairs: Sequence[BlockPairs]) -> list[tuple[int, CopyPlan]]:
        """(group, plan from slots to engine blocks) for every group that moves anything."""
        plans = [(pair.group, self.loading[pair.group].plan(pair.slots, pair.blocks)) for pair in pairs]
        return [(group, plan) for group, plan in plans if plan.blocks]

    def save_plans(self, orders: Sequence[SaveOrder]) -> list[tuple[int, CopyPlan]]:
        """(group, plan from engine blocks to slots of all orders) for every group that moves anything."""
        sides: dict[int, tuple[list[int], list[int]]] = {}
        for order in orders:
            for pair in order.pairs:
                blocks, slots = sides.setdefault(pair.group, ([], []))
                blocks += pair.blocks
                slots += pair.slots
        return [(group, self.saving[group].plan(*sides[group])) for group in sorted(sides) if sides[group][0]]

    def load_batches(self, run: LoadRun, order: LoadOrder, after: tuple[Flight, ...] = ()) -> list[Batch]:
        """All batches of a load, window by window, each ordered behind `after`."""
        plans = self.load_plans(order.pairs)
        moved = {layer for _, plan in plans for layer in plan.layers}
        every = windows_of(self.layers, order.window)
        windows = [tuple(layer for layer in window if layer in moved) for window in every]
        shares = [self._shares(plan, windows) for _, plan in plans]
        kept = [self.slab.digests[group][:, plan.pairs()[0]] if self.verify else None for group, plan in plans]
        batches: list[Batch] = []
        for nth, window in enumerate(windows):
            for (group, plan), share, digests in zip(plans, shares, kept, strict=True):
                mine, parts = share[nth]
                if not mine:
                    continue
                if digests is None:
                    batches += _in_a_row(run, run.id, window, parts, (), after)
                    continue
                ranges = [plan.digest_ranges(layer, read="target", order="source") for layer in mine]
                batches += _in_a_row(run, run.id, window, parts, ranges, after)
                slots, rows = plan.pairs()[0], self.rows[group]
                run.expected[batches[-1]] = tuple(Expected(group, slots, digests[rows[layer]]) for layer in mine)
        return batches

    def save_batches(self, save: SaveRun, written: Sequence[tuple[Sequence[int], Flight]]) -> list[Batch]:
        """The copies of a step's saves in the windows that have been written, each ordered behind its flight."""
        batches: list[Batch] = []
        for group, plan in save.plans:
            shares = self._shares(plan, [window for window, _ in written])
            for (mine, parts), (_, after) in zip(shares, written, strict=True):
                if not mine:
                    continue
                ranges = [plan.digest_ranges(layer, read="source", order="target") for layer in mine if self.verify]
                batches += _in_a_row(save, save.id, mine, parts, ranges, (after,))
                if ranges:
                    places = tuple((group, self.rows[group][layer], plan.pairs()[1]) for layer in mine)
                    save.places[batches[-1]] = places
        return batches

    def _shares(self, plan: CopyPlan, windows: Sequence[Sequence[int]]) -> "list[Share]":
        """For each window the layers that the plan has of it, and their pieces in batches within the limits."""
        mine = [tuple(layer for layer in window if layer in plan.columns) for window in windows]
        limits = self.config.layerwise_max_transfer_blocks, self.config.layerwise_max_transfer_bytes
        parts = iter(batches_of_all(plan, [layers for layers in mine if layers], *limits))
        sized = Sizes()
        return [(layers, [(part, sized.of(part)) for part in next(parts)] if layers else []) for layers in mine]


def _in_a_row(
    run: Run,
    owner: str,
    layers: tuple[int, ...],
    parts: Sequence[Part],
    digests: Sequence[DigestRanges],
    after: tuple[Flight, ...],
) -> list[Batch]:
    """A batch for each part; digests ride on the last one, since movers keep order."""
    *first, (end, size) = parts
    last = Batch(run, owner, layers, end, tuple(digests), after, size)
    return [*(Batch(run, owner, layers, part, (), after, its) for part, its in first), last]


class Sizes:
    """(bytes, copies) of pieces, counted once for those that share their arrays."""

    def __init__(self) -> None:
        self._last: tuple[Pieces, tuple[int, int]] | None = None

    def of(self, pieces: Pieces) -> tuple[int, int]:
        """Of these."""
        if self._last is None or self._last[0].length is not pieces.length or self._last[0].count is not pieces.count:
            self._last = pieces, (pieces.nbytes, int(pieces.count.sum()))
        return self._last[1]
