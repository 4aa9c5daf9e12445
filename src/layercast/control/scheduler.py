"""The scheduler side of a pool: what a prompt can have, who is promised what, and what became of it.

Talks to the worker side of every rank by orders and reports alone, which may cross a process boundary. Its methods
belong to one thread. Knows block numbers and tokens, never tensors, attention or how bytes move.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import lcm

import msgspec

from layercast.config import Config
from layercast.control.backing import Backing
from layercast.control.directory import Directory, Lease, LeaseState
from layercast.control.misses import why_missed
from layercast.control.names import Chain, Names, presence
from layercast.control.rates import Chooser
from layercast.control.tables import Table, allocated, at_indices, blocks_at, ending
from layercast.errors import Full, Missing, NotCacheable
from layercast.flow.orders import BlockPairs, LoadEnd, LoadOrder, LoadOutcome, SaveOrder, SaveOutcome, StepReport
from layercast.observe.receipts import MissReason
from layercast.plan.policy import ALONE, NO_HIT, Company, Decision, Estimate, Hit, Mode
from layercast.plan.prefix import BOUNDED, Usable, usable_prefix
from layercast.spec.groups import GroupSpec
from layercast.spec.keys import ExtrasOf, Identity

AT_ONCE = 8
"""Most blocks that are named by the order that saves them; the names of more are hashed while the device computes."""


class Match(msgspec.Struct, frozen=True):
    """What the pool can bring in for a prompt.

    usable: as far as it has it. keys: of all full blocks, hashed when they are asked for. miss: why `tokens` is 0.
    coming: usable leading tokens once the saves under way have landed, if these are more and worth a load; else 0.
    nbytes: of what is to be loaded. asked: of what, and of which state of the pool. weighed: what was decided by.
    """

    usable: Usable
    keys: tuple[Sequence[bytes], ...]
    decision: Decision = NO_HIT
    miss: MissReason | None = None
    coming: int = 0
    nbytes: int = 0
    asked: tuple[int, ...] = ()
    weighed: tuple[Company, Estimate | None] | None = None

    @property
    def tokens(self) -> int:
        """Leading tokens that need no computing, at most prompt - 1, those that the engine holds included; 0 where
        nothing beyond them is to be loaded."""
        return 0 if self.decision.mode is Mode.RECOMPUTE else self.usable.tokens

    @property
    def needed(self) -> tuple[range, ...]:
        """Block indices to load, by group."""
        return self.usable.needed


class Settled(msgspec.Struct, frozen=True):
    """What a report means for the engine.

    failed: requests whose forward read KV that had not landed. loads: outcomes; the blocks of their requests are quiet.
    saves: outcomes; the engine may let go of their source blocks. ended: ids of the orders that have by now ended on
    every rank.
    """

    failed: tuple[str, ...]
    loads: tuple[LoadOutcome, ...]
    saves: tuple[SaveOutcome, ...]
    ended: tuple[str, ...] = ()


@dataclass(slots=True)
class _Load:
    """A load under way. keys: of the leased slots, by group. left: ranks on which it has not ended."""

    lease: Lease
    keys: Sequence[Sequence[bytes]]
    left: int


@dataclass(slots=True)
class _Save:
    """A save under way. keys: of what is saved, by group. left: as in `_Load`. doomed: its KV is not to be trusted."""

    request: str
    reservation: str
    keys: Sequence[Sequence[bytes]]
    left: int
    doomed: bool = False


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a rank's worker tells the scheduler side once the engine's memory is registered.

    slots: as `Slab.slots`. block_bytes: of one block of each group on this rank.
    """

    specs: tuple[GroupSpec, ...]
    identities: tuple[Identity, ...]
    slots: tuple[int, ...]
    block_bytes: tuple[int, ...] = ()


class SchedulerSide:
    """Look up a prompt's KV, order its loads and saves, and settle what workers report of them.

    specs, identities: one a group; extras are named by the smallest block of all groups. shared_blocks: whether the
    engine lets requests read one another's blocks, so that a failed load may have misled others than its own request.
    block_bytes: of one block of each group on a rank. in_forward, told_ahead: as in `policy.Rules`.
    """

    def __init__(
        self,
        directory: Directory,
        config: Config,
        specs: Sequence[GroupSpec],
        identities: Sequence[Identity],
        shared_blocks: bool = False,
        block_bytes: Sequence[int] = (),
        in_forward: bool = True,
        told_ahead: int = 1,
        backing: Backing | None = None,
    ) -> None:
        self.directory = directory
        self.backing = backing or Backing(directory, (), specs, 0)
        self.config = config
        self.specs = tuple(specs)
        self._stride = lcm(*(spec.block_size for spec in specs))
        self._names = Names(specs, identities)
        self._unnamed: list[tuple[str, tuple[Chain, ...]]] = []
        """Reservations whose blocks have no names yet, and these names."""
        self._shared_blocks = shared_blocks
        self.chooser = Chooser(config, specs, block_bytes, in_forward, told_ahead, directory.clock)
        self._loading: dict[str, _Load] = {}
        self._saving: dict[str, _Save] = {}
        self._numbers = count()

    def match(
        self,
        tokens: Sequence[int],
        extras: ExtrasOf | None = None,
        local_tokens: int = 0,
        request: str | None = None,
        spare_last: bool = False,
        company: Company = ALONE,
        most_rest: int | None = None,
        last: Match | None = None,
    ) -> Match:
        """The longest prefix of `tokens` that can be loaded, beyond those the engine holds already. Promises nothing.

        request: keep the names of its blocks until `finish`, so that nothing is hashed twice. spare_last: leave out the
        last block that could be had, as the KV of a draft at its end depends on the token behind it. company: who else
        is in the forward to come. most_rest: most new tokens that it takes; None: no limit. last: what was answered
        before about the very same request: one that waits for room is asked about in every step.
        """
        if self.chooser.halted:
            return self._no(MissReason.STOPPED)
        keys = self._names.of(request, tokens, len(tokens), extras)
        try:
            self.name(keys)
            asked = self.directory.version, len(tokens), local_tokens, spare_last
            if last is None or last.asked != asked:
                last = self._found(keys, *asked)
        except NotCacheable:
            return self._no(MissReason.NOT_CACHEABLE)
        if (hit := last.usable.tokens - local_tokens) <= 0:
            return last
        weighed, rest = (company, self.chooser.rates.estimate), len(tokens) - last.usable.tokens
        if last.weighed == weighed:
            return last
        rest = rest if most_rest is None else min(rest, most_rest)
        decision, miss = self.chooser.decide(Hit(hit, last.nbytes, rest), *weighed), None
        if decision.mode is Mode.RECOMPUTE:
            short = hit < self.config.kv_recompute_threshold
            miss = MissReason.BELOW_THRESHOLD if short else MissReason.FASTER
        return msgspec.structs.replace(last, decision=decision, miss=miss, weighed=weighed)

    def _no(self, why: MissReason) -> Match:
        return Match(Usable(0, (range(0),) * len(self.specs)), ((),) * len(self.specs), miss=why)

    def _found(self, keys: tuple[Chain, ...], version: int, prompt: int, local_tokens: int, spare_last: bool) -> Match:
        """What is there of a prompt of so many tokens in this state of the pool, undecided. Raises NotCacheable."""

        def usable_of(has: Sequence[Sequence[bool]]) -> Usable:
            most = usable_prefix(self.specs, has, prompt, local_tokens=local_tokens)
            if not spare_last or most.tokens <= local_tokens:
                return most
            end = max(0, most.tokens - self._stride)
            return usable_prefix(self.specs, has, end + 1, local_tokens=min(local_tokens, end))

        usable, soon = usable_of(there := self._there(keys, local_tokens)), 0
        if self._coming(keys, there):
            soon = usable_of(self._there(keys, local_tokens, there)).tokens
        if soon <= usable.tokens or soon - local_tokens < self.config.kv_recompute_threshold:
            soon = 0
        miss = None
        if usable.tokens <= local_tokens:
            short, absences = prompt <= self._stride, self.directory.absences
            miss = MissReason.SHORT if short else why_missed(self.specs, keys, there, local_tokens, absences)
        asked = version, prompt, local_tokens, spare_last
        return Match(usable, keys, NO_HIT, miss, soon, self.chooser.nbytes(usable.needed), asked)

    def load_order(self, request: str, match: Match, tables: Sequence[Table]) -> LoadOrder | None:
        """Lease the blocks of a match and order their load into the engine's blocks; None if they are gone by now.

        Blocks of a window group for which the engine has no memory have left the window, and are not loaded. The lease
        of a load in the background lasts: nothing may prove it lost once it is said to have come.
        """
        if not match.tokens:
            return None
        needed = [allocated(*one) for one in zip(self.specs, tables, match.needed, strict=True)]
        wanted = [at_indices(keys, indices) for keys, indices in zip(match.keys, needed, strict=True)]
        blocks = [blocks_at(table, indices) for table, indices in zip(tables, needed, strict=True)]
        try:
            lease = self.directory.lease(request, wanted, lasting=match.decision.parked)
        except Missing:
            return None
        pairs = tuple([BlockPairs(group, slots, blocks[group]) for group, slots in enumerate(lease.slots) if slots])
        how = match.decision
        name = f"load-{next(self._numbers)}"
        order = LoadOrder(name, request, match.tokens, pairs, how.window, how.hidden_bytes)
        self._loading[order.id] = _Load(lease, wanted, self.directory.ranks)
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

        None if there is nothing to save, or no room (then nothing was reserved). `tokens` and tables may be longer than
        `after`. Of many blocks none of which the pool has, the names are hashed later, from `tokens`, which may grow
        meanwhile but not change (`name`).
        """
        if self.chooser.halted:
            return None
        after = min(after, len(tokens))
        held = [ending(spec, table, before, after) for spec, table in zip(self.specs, tables, strict=True)]
        if not any(indices for indices, _ in held):
            return None
        told = tokens[:after] if self.directory.changes is not None and not extras else ()
        chains = self._names.of(request, tokens, after, extras)
        try:
            self.name(chains)
            for group, (chain, (indices, _)) in enumerate(zip(chains, held, strict=True)):
                if len(chain) - len(chain.known) > AT_ONCE:
                    chain.until(self.directory.has(group, coming=True), indices[0] if indices else 0)
                else:
                    chain.upto(len(chain))
            reservation = self.directory.reserve(request, [chain.known for chain in chains], held, told)
        except (NotCacheable, Full):
            return None
        if not reservation.blocks:
            return None
        if any(len(chain.known) < len(chain) for chain in chains):
            self._unnamed.append((reservation.id, chains))
        groups = enumerate(zip(reservation.slots, tables, reservation.indices, strict=True))
        pairs = [BlockPairs(group, slots, blocks_at(table, at)) for group, (slots, table, at) in groups if slots]
        order = SaveOrder(f"save-{next(self._numbers)}", request, tuple(pairs))
        self._saving[order.id] = _Save(request, reservation.id, reservation.keys, self.directory.ranks)
        return order

    def settle(self, report: StepReport, rank: int = 0) -> Settled:
        """Make a step's saves visible, end its leases, drop what turned out bad; each once every rank has reported."""
        self.name()
        loads = tuple([self._judged(load) for load in report.loads])
        self.chooser.heard(report.halted, loads)
        overdue = {load.request for load, told in zip(loads, report.loads, strict=True) if load.end is not told.end}
        failed = tuple(sorted(overdue.union(report.failed)))
        if failed:
            for saving in self._saving.values():
                saving.doomed |= self._shared_blocks or saving.request in failed
        ended = []
        for save in report.saves:
            mine = self._saving[save.id]
            if save.saved and not mine.doomed:
                if self.directory.commit(mine.reservation, rank):
                    self.backing.saved(mine.request, mine.keys)
            else:
                self.directory.revoke(mine.reservation, rank)
            mine.left -= 1
            if not mine.left:
                del self._saving[save.id]
                ended.append(save.id)
        ended += [load.id for load in loads if self._ended(load)]
        self.backing.settle(report.tier, rank)
        return Settled(failed, loads, report.saves, tuple(ended))

    def name(self, like: Sequence[Chain] = ()) -> None:
        """Give what is being saved its names; best while the device computes, and before one of them is looked for.

        like: keys to be looked for: what begins with another key can wait. Raises NotCacheable if they have no names.
        """
        if not self._unnamed:
            return
        first, waiting, self._unnamed = self._names.first(like), self._unnamed, []
        for reservation, chains in waiting:
            if like and self._names.first(chains) != first:
                self._unnamed.append((reservation, chains))
                continue
            with suppress(NotCacheable):  # what can't be named is not found
                for chain in chains:
                    chain.upto(len(chain))
            self.directory.name(reservation)

    def doom(self, save: str) -> None:
        """Publish nothing of a save under way: its source blocks may have changed under the copy."""
        if save in self._saving:
            self._saving[save].doomed = True

    def renew(self) -> None:
        """Give all KV to come another identity: what is stored, or on its way into the slab, is found no more.

        Nothing goes below the slab from now on, as nobody else knows the new identity.
        """
        self.name()
        self.backing.retire()
        self.directory.disown()
        for save in self._saving:
            self.doom(save)
        self._names.renew()

    def seek(self, request: str, tokens: Sequence[int], extras: ExtrasOf | None = None) -> None:
        """Look below the slab for what it lacks of a new request's prompt, and have it brought up. Returns at once."""
        self.name()
        with suppress(NotCacheable):
            self.backing.seek(request, self._names.of(request, tokens, len(tokens), extras), len(tokens))

    def rising(self, request: str, coming: bool) -> bool:
        """Whether more may come from below the slab. coming: whether blocks of the prompt are on their way to it."""
        return self.backing.seeking(request) or (coming and self.backing.fetching)

    def finish(self, request: str) -> None:
        """Forget a request's names; its saves go on."""
        self._names.forget(request)
        self.backing.forget(request)

    def close(self, timeout_s: float) -> None:
        """End what looks below the slab. A second call changes nothing. Raises DeadlineExceeded."""
        self.backing.close(timeout_s)

    @property
    def idle(self) -> bool:
        """Whether every lease and reservation has ended."""
        return self.directory.idle

    @property
    def awaits_reports(self) -> bool:
        """Whether an order has not ended on every rank."""
        return bool(self._loading or self._saving) or self.backing.awaits_reports

    def _judged(self, load: LoadOutcome) -> LoadOutcome:
        """The outcome; lost where its slots may have been another's while it read them and no digest was compared."""
        mine = self._loading.get(load.id)
        if mine is None or mine.lease.state is LeaseState.HELD or load.verified or load.end is not LoadEnd.LANDED:
            return load
        reason = f"its lease was {mine.lease.state} before it had landed"
        return msgspec.structs.replace(load, end=LoadEnd.LOST, reason=reason)

    def _ended(self, load: LoadOutcome) -> bool:
        """Drop what turned out bad; whether this was the last rank's outcome."""
        mine = self._loading.get(load.id)
        if mine is None:
            return False  # a push that was received has no lease here
        bad = set(load.bad_slots)
        for group, (slots, named) in enumerate(zip(mine.lease.slots, mine.keys, strict=True) if bad else ()):
            self.directory.forget(group, [key for slot, key in zip(slots, named, strict=True) if (group, slot) in bad])
        mine.left -= 1
        if mine.left:
            return False
        self.directory.release(mine.lease)
        del self._loading[load.id]
        return True

    def _coming(self, chains: Sequence[Chain], there: Sequence[Sequence[bool]]) -> bool:
        """Whether any block is being saved that was looked for and is not there: else a second look finds no more."""
        every = zip(self.specs, chains, there, strict=True)
        asked = [chain.known if spec.kind in BOUNDED else chain.known[len(has) :] for spec, chain, has in every]
        return self.directory.saves(asked)

    def _there(
        self, chains: Sequence[Chain], local_tokens: int, now: Sequence[Sequence[bool]] = ()
    ) -> list[list[bool]]:
        """What is there, or, if that is given, what will be once the saves under way have landed."""
        has = [self.directory.has(group, coming=bool(now)) for group in range(len(chains))]
        return presence(self.specs, chains, has, local_tokens, now)
