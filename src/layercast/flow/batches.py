"""From an order to batches: which windows of which blocks are submitted together, and what is hashed on the way.

Does not know queues, gates or threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from layercast.config import Config
from layercast.flow.issue import Batch, Run
from layercast.flow.orders import BlockPairs, LoadOrder
from layercast.flow.runs import Expected, LoadRun, SaveRun
from layercast.move.base import Digests, Flight
from layercast.plan.batches import batches_of_all, windows_of
from layercast.plan.pieces import CopyPlan, DigestRanges, Pieces, Route, route_between
from layercast.spec.groups import Layout

Share = tuple[tuple[int, ...], list[Pieces]]
"""Layers of a window that one group has, and their pieces."""


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

    verify: whether what moves is hashed. What lies on a device is not: reading it back costs more than moving it.
    """

    slab: SlabMemory
    config: Config
    layers: tuple[int, ...]
    saving: tuple[Route, ...]
    loading: tuple[Route, ...]
    verify: bool

    @staticmethod
    def between(engine: Layout, slab: SlabMemory, config: Config, *, on_device: bool = False) -> "Ways":
        """Routes between an engine's layout, whose memory may be a device's, and a slab. Raises LayoutMismatch."""
        pairs = list(zip(engine.groups, slab.layout.groups, strict=True))
        return Ways(
            slab,
            config,
            engine.layers,
            tuple(route_between(ours, theirs) for ours, theirs in pairs),
            tuple(route_between(theirs, ours) for ours, theirs in pairs),
            config.verify and not on_device,
        )

    @property
    def slots(self) -> tuple[int, ...]:
        """Number of slots of each group."""
        return tuple(group.blocks for group in self.slab.layout.groups)

    def load_plans(self, pairs: Sequence[BlockPairs]) -> list[tuple[int, CopyPlan]]:
        """(group, plan from slots to engine blocks) for every group that moves anything."""
        plans = [(pair.group, self.loading[pair.group].plan(pair.slots, pair.blocks)) for pair in pairs]
        return [(group, plan) for group, plan in plans if plan.blocks]

    def save_plans(self, pairs: Sequence[BlockPairs]) -> list[tuple[int, CopyPlan]]:
        """(group, plan from engine blocks to slots) for every group that moves anything."""
        plans = [(pair.group, self.saving[pair.group].plan(pair.blocks, pair.slots)) for pair in pairs]
        return [(group, plan) for group, plan in plans if plan.blocks]

    def load_batches(self, run: LoadRun, order: LoadOrder, after: tuple[Flight, ...] = ()) -> list[Batch]:
        """All batches of a load, window by window, each ordered behind `after`."""
        plans = self.load_plans(order.pairs)
        moved = {layer for _, plan in plans for layer in plan.layers}
        windows = [[layer for layer in window if layer in moved] for window in windows_of(self.layers, order.window)]
        shares = [self._shares(plan, windows) for _, plan in plans]
        batches: list[Batch] = []
        for nth, window in enumerate(windows):
            for (group, plan), share in zip(plans, shares, strict=True):
                mine, parts = share[nth]
                if mine:
                    batches += self._loads_of_group(run, tuple(window), (mine, parts), group, plan, after)
        return batches

    def _loads_of_group(
        self,
        run: LoadRun,
        window: tuple[int, ...],
        share: "Share",
        group: int,
        plan: CopyPlan,
        after: tuple[Flight, ...],
    ) -> list[Batch]:
        """One window's copies of one group."""
        mine, parts = share
        ranges = [plan.digest_ranges(layer, read="target", order="source") for layer in mine if self.verify]
        batches = _in_a_row(run, run.id, window, parts, ranges, after)
        if ranges:
            slots = plan.pairs()[0]
            stored = self.slab.digests[group]
            run.expected[batches[-1]] = tuple(
                Expected(group, slots, stored[self._place(group, layer), slots]) for layer in mine
            )
        return batches

    def save_batches(self, save: SaveRun, written: Sequence[tuple[Sequence[int], Flight]]) -> list[Batch]:
        """The copies of a save in the windows that have been written, each ordered behind its flight."""
        if not save.shares:  # once for all windows of the step
            windows = windows_of(self.layers, self.config.layerwise_window)
            firsts = [window[0] for window in windows]
            save.shares = [dict(zip(firsts, self._shares(plan, windows), strict=True)) for _, plan in save.plans]
        batches: list[Batch] = []
        for (group, plan), shares in zip(save.plans, save.shares, strict=True):
            for window, after in written:
                mine, parts = shares[window[0]]
                if not mine:
                    continue
                ranges = [plan.digest_ranges(layer, read="source", order="target") for layer in mine if self.verify]
                batches += _in_a_row(save, save.order.id, mine, parts, ranges, (after,))
                if ranges:
                    places = tuple((group, self._place(group, layer), plan.pairs()[1]) for layer in mine)
                    save.places[batches[-1]] = places
        return batches

    def _shares(self, plan: CopyPlan, windows: Sequence[Sequence[int]]) -> "list[Share]":
        """For each window the layers that the plan has of it, and their pieces in batches within the limits."""
        mine = [tuple(layer for layer in window if layer in plan.columns) for window in windows]
        limits = self.config.layerwise_max_transfer_blocks, self.config.layerwise_max_transfer_bytes
        parts = iter(batches_of_all(plan, [layers for layers in mine if layers], *limits))
        return [(layers, next(parts) if layers else []) for layers in mine]

    def _place(self, group: int, layer: int) -> int:
        """The layer's row in the group's digests."""
        return self.slab.layout.groups[group].layers.index(layer)


def _in_a_row(
    run: Run,
    owner: str,
    layers: tuple[int, ...],
    parts: Sequence[Pieces],
    digests: Sequence[DigestRanges],
    after: tuple[Flight, ...],
) -> list[Batch]:
    """A batch for each part; digests ride on the last one, since movers keep order."""
    *first, end = parts
    last = Batch(run, owner, layers, end, tuple(digests), after)
    return [*(Batch(run, owner, layers, part, (), after) for part in first), last]
