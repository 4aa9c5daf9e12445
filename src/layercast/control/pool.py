"""The embedded pool: an engine's scheduler side (keys, leases, slots) over its worker side (copies), in one process.

Its methods belong to the engine's thread. Knows block numbers and tokens, never tensors or attention.
"""

from collections.abc import Sequence
from itertools import count

import msgspec

from layercast.config import Config
from layercast.control.directory import Directory, Lease, Reservation
from layercast.control.shelf import Absence
from layercast.errors import BadBlocks, Full, Missing, NotCacheable
from layercast.flow.orders import (
    BlockPairs,
    LoadOrder,
    LoadOutcome,
    SaveOrder,
    SaveOutcome,
    StepOrders,
    StepReport,
)
from layercast.flow.worker import LayerStep, Worker
from layercast.observe.receipts import MissReason
from layercast.plan.policy import Mode, decide
from layercast.plan.prefix import usable_prefix
from layercast.spec.groups import GroupSpec, Layout
from layercast.spec.keys import ExtrasOf, Identity, block_keys

Table = Sequence[int | None]
"""Engine block of each block index of one group; None where none is allocated."""


class Match(msgspec.Struct, frozen=True):
    """What the pool can bring in for a prompt.

    tokens: usable leading tokens, at most prompt - 1. needed: block indices to load, by group. window: as in LoadOrder.
    miss: why tokens is 0.
    """

    tokens: int
    needed: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[bytes, ...], ...]
    window: int
    miss: MissReason | None = None


class Settled(msgspec.Struct, frozen=True):
    """What a report means for the engine.

    failed: requests whose forward read KV that had not landed. loads: outcomes; the blocks of their requests are quiet.
    saves: outcomes; the engine may let go of their source blocks.
    """

    failed: tuple[str, ...]
    loads: tuple[LoadOutcome, ...]
    saves: tuple[SaveOutcome, ...]


class Pool:
    """Look up, load and save a prompt's KV. Open one with `control.node.open_pool`."""

    def __init__(self, worker: Worker, directory: Directory, engine: Layout, identities: Sequence[Identity]) -> None:
        self.worker = worker
        self.directory = directory
        self.config: Config = worker.ways.config
        self.specs: tuple[GroupSpec, ...] = tuple(group.spec for group in engine.groups)
        self._identities = tuple(identities)
        self._names: dict[str, list[list[bytes]]] = {}
        self._leases: dict[str, tuple[Lease, list[list[bytes]]]] = {}
        """Load order to its lease and the keys of the leased slots, by group."""
        self._saving: dict[str, tuple[str, str]] = {}
        """Save order to (request, reservation)."""
        self._doomed: set[str] = set()
        self._numbers = count()

    def match(self, tokens: Sequence[int], extras: ExtrasOf | None = None) -> Match:
        """The longest prefix of `tokens` that can be loaded. No side effects."""
        nothing = ((),) * len(self.specs)
        try:
            keys = tuple(tuple(block_keys(identity, tokens, extras)) for identity in self._identities)
        except NotCacheable:
            return Match(0, nothing, nothing, 0, MissReason.NOT_CACHEABLE)
        present = [self.directory.present(group, named) for group, named in enumerate(keys)]
        usable = usable_prefix(self.specs, present, len(tokens))
        layers = len(self.worker.ways.layers)
        decision = decide(
            usable.tokens,
            threshold=self.config.kv_recompute_threshold,
            use_layerwise=self.config.use_layerwise,
            window=self.config.layerwise_window,
            layers=layers,
        )
        if usable.tokens == 0:
            return Match(0, nothing, keys, 0, self._why(keys))
        if decision.mode is Mode.RECOMPUTE:
            return Match(0, nothing, keys, 0, MissReason.BELOW_THRESHOLD)
        return Match(usable.tokens, usable.needed, keys, decision.window)

    def load_order(self, request: str, match: Match, tables: Sequence[Table]) -> LoadOrder | None:
        """Lease the blocks of a match and order their load into the engine's blocks; None if they are gone by now."""
        if not match.tokens:
            return None
        wanted = [[keys[i] for i in indices] for keys, indices in zip(match.keys, match.needed, strict=True)]
        try:
            lease = self.directory.lease(request, wanted)
        except Missing:
            return None
        pairs = tuple(
            BlockPairs(group, slots, tuple(_block(tables[group], index) for index in match.needed[group]))
            for group, slots in enumerate(lease.slots)
            if slots
        )
        order = LoadOrder(f"load-{next(self._numbers)}", request, match.tokens, pairs, match.window)
        self._leases[order.id] = (lease, wanted)
        return order

    def save_order(
        self,
        request: str,
        tokens: Sequence[int],
        before: int,
        after: int,
        tables: Sequence[Table],
        extras: ExtrasOf | None = None,
    ) -> SaveOrder | None:
        """Reserve slots for the blocks that end in (before, after], as far as nobody has them or saves them.

        None if there is nothing to save, or no room (then nothing was reserved). `tokens` may be longer than `after`.
        """
        names = self._named(request, tokens[:after], extras)
        spans = [_ending(spec, table, before, after) for spec, table in zip(self.specs, tables, strict=True)]
        if not any(spans):
            return None
        keys = [[named[i] for i in span] for named, span in zip(names, spans, strict=True)]
        try:
            reservation = self.directory.reserve(request, keys)
        except Full:
            return None
        if not reservation.blocks:
            return None
        order = SaveOrder(f"save-{next(self._numbers)}", request, _save_pairs(reservation, spans, tables))
        self._saving[order.id] = (request, reservation.id)
        return order

    def begin(self, orders: StepOrders) -> LayerStep:
        """Start the step's copies."""
        return self.worker.begin(orders)

    def settle(self, report: StepReport) -> Settled:
        """Make a step's saves visible, end its leases, drop what turned out bad."""
        for order, (request, _) in self._saving.items():
            if request in report.failed:
                self._doomed.add(order)
        for save in report.saves:
            _, reservation = self._saving.pop(save.id)
            if save.saved and save.id not in self._doomed:
                self.directory.commit(reservation)
            else:
                self.directory.revoke(reservation)
            self._doomed.discard(save.id)
        return Settled(report.failed, tuple(self._ended(load) for load in report.loads), report.saves)

    def reports(self, step: int, timeout_s: float = 0.0) -> Settled:
        """Settle what has ended since the last step, first waiting up to `timeout_s` for what is under way."""
        if timeout_s:
            self.worker.issuer.wait_idle(timeout_s)
        return self.settle(self.worker.report(step))

    def abort(self, request: str) -> None:
        """Stop a request's copies. Its blocks are quiet once their outcomes have been settled."""
        self.worker.abort(request)
        self.finish(request)

    def finish(self, request: str) -> None:
        """Forget a request's names; its saves go on."""
        self._names.pop(request, None)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and every lease and reservation has ended."""
        return self.worker.idle and self.directory.idle

    def _ended(self, load: LoadOutcome) -> LoadOutcome:
        held = self._leases.pop(load.id, None)
        if held is not None:
            lease, keys = held
            self.directory.release(lease)
            bad = set(load.bad_slots)
            for group, (slots, named) in enumerate(zip(lease.slots, keys, strict=True)):
                self.directory.forget(
                    group, [key for slot, key in zip(slots, named, strict=True) if (group, slot) in bad]
                )
        return load

    def _named(self, request: str, tokens: Sequence[int], extras: ExtrasOf | None) -> list[list[bytes]]:
        names = self._names.setdefault(request, [[] for _ in self.specs])
        for group, identity in enumerate(self._identities):
            if len(tokens) // identity.block_size > len(names[group]):
                names[group] = block_keys(identity, tokens, extras, names[group])
        return names

    def _why(self, keys: Sequence[Sequence[bytes]]) -> MissReason:
        if not any(keys):
            return MissReason.SHORT
        group = next(group for group, named in enumerate(keys) if named)
        absence = self.directory.absences(group, keys[group][:1])[0]
        return MissReason.NEVER_STORED if absence is None else _REASONS.get(absence, MissReason.NEVER_STORED)


_REASONS = {Absence.EVICTED: MissReason.EVICTED, Absence.CORRUPT: MissReason.CORRUPT}


def _block(table: Table, index: int) -> int:
    block = table[index]
    if block is None:
        raise BadBlocks(f"block {index} is to be loaded, but the engine has allocated no memory for it")
    return block


def _ending(spec: GroupSpec, table: Table, before: int, after: int) -> list[int]:
    """Indices of the blocks that end in (before, after] and that the engine holds.

    Of a recurrent group these are the snapshots it took; elsewhere a block that slid out of a window has gone.
    """
    first, last = before // spec.block_size, after // spec.block_size
    return [index for index in range(first, min(last, len(table))) if table[index] is not None]


def _save_pairs(
    reservation: Reservation, spans: Sequence[Sequence[int]], tables: Sequence[Table]
) -> tuple[BlockPairs, ...]:
    pairs = []
    for group, (chosen, slots) in enumerate(zip(reservation.indices, reservation.slots, strict=True)):
        if slots:
            blocks = tuple(_block(tables[group], spans[group][place]) for place in chosen)
            pairs.append(BlockPairs(group, slots, blocks))
    return tuple(pairs)
