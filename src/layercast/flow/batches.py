"""From an order to batches: which windows of which blocks are submitted together, and what is hashed on the way.

Does not know queues, gates or threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from layercast.config import Config
from layercast.flow.issue import Batch
from layercast.flow.orders import BlockPairs, LoadOrder, SaveOrder
from layercast.flow.runs import Kept, LoadRun, SaveRun
from layercast.move.base import Digests, Flight
from layercast.plan.batches import batches_of, windows_by_layer, windows_of
from layercast.plan.pieces import CopyPlan, Route, Side, route_between
from layercast.spec.groups import Layout

SAVE_PARTS, AT_ONCE_BYTES = 4, 64 << 20
"""In how many parts a device saves a step's layers, if they are more bytes than a link carries in a millisecond."""
LAYER_BYTES = 8 << 20
"""Of a layer: from so many on a device cuts up and writes down one for all that are alike, each of them a part. Shorter
ones fill its staging memory together."""


def saved_together(layers: int, nbytes: int) -> int:
    """Layers that a device saves in one part, of a step's saves of so many bytes; 0 = all."""
    return -(-layers // SAVE_PARTS) if nbytes > AT_ONCE_BYTES else 0


def saved_apart(route: Route, window: Sequence[int], layer_bytes: int) -> tuple[tuple[int, ...], ...]:
    """The parts in which a device moves layers that it saves together, of about so many bytes each.

    Long ones go by themselves, unless a block's lie side by side, and are one copy together.
    """
    apart = layer_bytes >= LAYER_BYTES and not route.joins(window)
    return tuple((layer,) for layer in window) if apart else (tuple(window),)


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

    sizes: bytes of a block of each group. rows: for each, the row of each layer in its digests. on_device: whether the
    engine's memory is a device's. stagger_s: how much later than the first rank's this one's loads start.
    """

    slab: SlabMemory
    config: Config
    layers: tuple[int, ...]
    saving: tuple[Route, ...]
    loading: tuple[Route, ...]
    sizes: tuple[int, ...]
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
            tuple(group.block_bytes for group in slab.layout.groups),
            tuple({layer: row for row, layer in enumerate(group.layers)} for group in slab.layout.groups),
            on_device,
            rank * config.h2d_stagger_us / 1e6,
        )

    @property
    def limits(self) -> tuple[int, ...]:
        """Most blocks and bytes of a batch, where it has limits."""
        limits = self.config.layerwise_max_transfer_blocks, self.config.layerwise_max_transfer_bytes
        return limits if any(limits) else ()

    @property
    def verify(self) -> bool:
        """Whether what moves is hashed. What lies on a device is not: reading it back costs more than moving it."""
        return self.config.verify and not self.on_device

    def save_windows(self, orders: Sequence[SaveOrder]) -> Mapping[int, tuple[int, ...]]:
        """For each layer those that are saved together with it.

        A device is handed a step's saves at its end, so that a few parts of it overlap with compute as well as a part
        a layer does, for less of the forward's time; and where they are few bytes, none needs to.
        """
        window = self.config.layerwise_window if self.config.use_layerwise else 0
        if self.on_device and window:
            nbytes = sum(self.sizes[pair.group] * len(pair.slots) for order in orders for pair in order.pairs)
            together = saved_together(len(self.layers), nbytes)
            window = together and max(window, together)
        return windows_by_layer(self.layers, window)

    @property
    def slots(self) -> tuple[int, ...]:
        """Number of slots of each group."""
        return tuple(group.blocks for group in self.slab.layout.groups)

    def saving_of(self, orders: Sequence[SaveOrder]) -> SaveRun:
        """A step's saves, of which nothing has been planned yet."""
        return SaveRun(orders, self.slab.layout.groups, self.sizes, self.slab.digests, self.rows)

    def load_plans(self, pairs: Sequence[BlockPairs]) -> list[tuple[int, CopyPlan]]:
        """(group, plan from slots to engine blocks) for every group that moves anything."""
        plans = [(pair.group, self.loading[pair.group].plan(pair.slots, pair.blocks)) for pair in pairs]
        return [(group, plan) for group, plan in plans if plan.blocks]

    def save_plans(self, orders: Sequence[SaveOrder]) -> dict[int, CopyPlan]:
        """For every group that moves anything the plan from engine blocks to slots of all orders."""
        sides: dict[int, tuple[list[int], list[int]]] = {}
        for order in orders:
            for pair in order.pairs:
                blocks, slots = sides.setdefault(pair.group, ([], []))
                blocks += pair.blocks
                slots += pair.slots
        return {group: self.saving[group].plan(*sides[group]) for group in sorted(sides) if sides[group][0]}

    def load_batches(
        self, run: LoadRun, order: LoadOrder, after: tuple[Flight, ...] = (), whole: bool = False
    ) -> list[Batch]:
        """All batches of a load, window by window, each ordered behind `after`.

        whole: windows that are alike are to be one batch, as far as batches have no limits.
        """
        plans = self.load_plans(order.pairs)
        if self.verify:
            for group, plan in plans:
                slots = plan.pairs()[0]
                run.kept[group] = Kept(slots, self.rows[group], self.slab.digests[group].take(slots, axis=1))
        windows = windows_of(self.layers, order.window)
        cuts = [windows] if whole and not self.limits else [(window,) for window in windows]
        return self._batches(run, plans, ("target", "source"), [(cut, after) for cut in cuts])

    def save_batches(self, save: SaveRun, written: Sequence[tuple[Sequence[int], Flight]]) -> list[Batch]:
        """The copies of a step's saves in the windows that have been written, each ordered behind its flight.

        Raises BadBlocks for ids that can't be.
        """
        save.plans = save.plans or self.save_plans(save.orders)
        apart, batches = self.on_device and not self.limits, list[Batch]()
        for window, mark in written:
            for group, plan in save.plans.items():
                each = self.sizes[group] * plan.blocks // len(plan.layers)
                cut = saved_apart(plan.route, window, each) if apart else (tuple(window),)
                batches += self._batches(save, [(group, plan)], ("source", "target"), [(cut, (mark,))])
        return batches

    def _batches(
        self,
        run: LoadRun | SaveRun,
        plans: Sequence[tuple[int, CopyPlan]],
        hashed: tuple[Side, Side],
        cuts: Sequence[tuple[tuple[tuple[int, ...], ...], tuple[Flight, ...]]],
    ) -> list[Batch]:
        """What plans move of each cut, which is some windows and what they wait for; alike ones as a series.

        hashed: which side is read, and which is the slab's. Of what the limits cut up the last batch is hashed, since
        movers keep order.
        """
        batches, (read, slab) = list[Batch](), hashed
        for windows, after in cuts:
            for group, plan in plans:
                ranges = partial(plan.digest_ranges, read=read, order=slab) if self.verify else None
                for (_, _, _, part_of, _), series, nbytes in plan.series(windows):
                    layers = tuple(part_of)
                    batch = Batch(run, run.id, layers, series, ranges, after, nbytes, group, part_of)
                    if self.limits:
                        *first, last = batches_of(plan, layers, *self.limits)
                        batches += [replace(batch, pieces=part, hashed=None, nbytes=part.nbytes) for part in first]
                        batch = replace(batch, pieces=last, nbytes=last.nbytes)
                    batches.append(batch)
        return batches
