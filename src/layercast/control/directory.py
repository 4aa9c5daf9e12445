"""The scheduler side's record of the pool: which block lies in which slot, who may rely on it and until when.

One thread owns a directory. Worker reports reach it by id, so that a late report about something that has ended changes
nothing. Does not know addresses, bytes, tensors or how blocks move.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import count
from math import inf

import msgspec

from layercast.control.changes import Changes
from layercast.control.shelf import Absence, Shelf
from layercast.control.tables import Held
from layercast.errors import Full, Missing, Refused

__all__ = ["Absence", "Directory", "Lease", "LeaseState", "Reservation", "Stats"]

Keys = Sequence[bytes]


class LeaseState(StrEnum):
    """Whether a lease still holds its blocks."""

    HELD = "held"
    EXPIRED = "expired"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class Lease:
    """A token: these blocks stay in these slots until `release`, or until `deadline` on the directory's clock.

    slots: for each group, one slot a key, in the order asked for. Bytes read are good only if the state is still HELD
    after the last one was read.
    """

    id: str
    request: str
    slots: tuple[tuple[int, ...], ...]
    deadline: float
    state: LeaseState = LeaseState.HELD


class Reservation(msgspec.Struct, frozen=True):
    """Slots to save into: for each group the indices of the keys to be saved, their slots, and the keys themselves.

    keys: as far as they have names; more come with `Directory.name`. It lasts until every rank has reported, however
    long: a slot that a copy may still reach can't be another's.
    """

    id: str
    request: str
    indices: tuple[Sequence[int], ...]
    slots: tuple[tuple[int, ...], ...]
    keys: tuple[list[bytes], ...]

    @property
    def blocks(self) -> int:
        """Blocks to save; 0 when all are stored or being saved already (there is then nothing to report)."""
        return sum(map(len, self.slots))


class Stats(msgspec.Struct, frozen=True):
    """Counts since the start. Blocks, unless the name says otherwise."""

    hits: int
    """Leased."""
    misses: dict[Absence, int]
    """Not found by a lease, or by a save that then had to store them; by reason."""
    saved: int
    evictions: int
    forgotten: int
    saves_dropped: int
    """Saves (not blocks) refused for want of room."""
    saves_failed: int
    """Reservations revoked."""
    leases_expired: int
    double_releases: int
    """Releases of a lease that had been released."""
    late_reports: int
    """Reports about a reservation that had ended."""


@dataclass(slots=True)
class _Saving:
    """A reservation under way. chains: the keys of the whole prefix, by group, as far as they are known.

    ended: ranks that have, with their bytes or without; failed: whether one has without.
    """

    reservation: Reservation
    chains: tuple[Keys, ...]
    tokens: Sequence[int]
    ended: set[int] = field(default_factory=set)
    failed: bool = False


class Directory:
    """Keys, slots, leases and reservations of all groups.

    slots_per_group: as `Slab.slots`. clock: seconds, never going back. lease_s: life of a lease.
    ranks: how many must report before a save is visible. remember: dropped keys of each group whose fate is kept.
    """

    def __init__(
        self,
        slots_per_group: Sequence[int],
        clock: Callable[[], float],
        lease_s: float,
        *,
        ranks: int = 1,
        remember: int = 16_384,
    ) -> None:
        if ranks < 1 or lease_s <= 0:
            raise Refused(f"ranks = {ranks}, lease_s = {lease_s}: both must be positive")
        self._shelves = tuple(Shelf(slots, remember) for slots in slots_per_group)
        self.clock = clock
        self._lease_s = lease_s
        self.ranks = ranks
        self._leases: OrderedDict[str, Lease] = OrderedDict()
        self._kept: dict[str, Lease] = {}
        """Leases without a deadline."""
        self._savings: OrderedDict[str, _Saving] = OrderedDict()
        self._numbers = count()
        self._counts: Counter[str] = Counter()
        self._misses: Counter[Absence] = Counter()
        self.changes: Changes | None = None

    def record(self) -> None:
        """From now on note what becomes visible and what is dropped, in `changes`."""
        self.changes = Changes()
        for group, shelf in enumerate(self._shelves):
            shelf.dropped = partial(self.changes.dropped, group)

    def disown(self) -> None:
        """Drop all that is stored: nobody asks for these keys any more."""
        for shelf in self._shelves:
            shelf.forget(shelf.stored, Absence.EVICTED)

    # ---- looking up, without side effects ----

    def present(self, group: int, keys: Keys) -> list[bool]:
        """Whether each key can be leased now."""
        return list(map(self.has(group), keys))

    def absences(self, group: int, keys: Keys) -> list[Absence | None]:
        """Why each key can't be leased now; None where it can."""
        shelf = self._shelves[group]
        return [shelf.absence(key) for key in keys]

    def room(self) -> tuple[int, ...]:
        """Blocks that a save could get in each group now: free slots, and those of blocks that nobody leases."""
        return tuple(shelf.room() for shelf in self._shelves)

    def saves(self, keys: Sequence[Keys]) -> bool:
        """Whether any of some keys of each group is being saved."""
        return any(shelf.saving and not shelf.saving.keys().isdisjoint(some) for shelf, some in self._by_group(keys))

    @property
    def idle(self) -> bool:
        """Whether there is no lease and no reservation."""
        return not self._leases and not self._savings and not self._kept

    @property
    def stats(self) -> Stats:
        """What has been counted so far."""
        return Stats(
            misses=dict(+self._misses),
            evictions=sum(shelf.evictions for shelf in self._shelves),
            **{name: self._counts[name] for name in _COUNTED},
        )

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of each group, free or not."""
        return tuple(shelf.table.slots for shelf in self._shelves)

    def has(self, group: int, coming: bool = False) -> Callable[[bytes], bool]:
        """Whether a key can be leased now. coming: or once the saves under way have landed."""
        return self._shelves[group].has(coming)

    @property
    def version(self) -> int:
        """Another number whenever `has`, or `absences`, may answer otherwise."""
        return sum([shelf.version for shelf in self._shelves])

    # ---- leases ----

    def keep(self, request: str, wanted: Sequence[Keys]) -> Lease:
        """As `lease`, but until it is released, for copies that take the time they need; counts as no hit."""
        lease = self._pinned(request, wanted, inf)
        self._kept[lease.id] = lease
        return lease

    def lease(self, request: str, wanted: Sequence[Keys], lasting: bool = False) -> Lease:
        """Hold the blocks of `wanted`, keys of each group, where they are: all of them or none.

        lasting: until it is released. Raises Missing with how many are absent and why.
        """
        self.expire(self.clock())
        if lasting:
            lease = self.keep(request, wanted)
        else:
            lease = self._pinned(request, wanted, self.clock() + self._lease_s)
            self._leases[lease.id] = lease
        self._counts["hits"] += sum(map(len, lease.slots))
        return lease

    def _pinned(self, request: str, wanted: Sequence[Keys], deadline: float) -> Lease:
        groups = list(self._by_group(wanted))
        try:
            slots = [tuple(map(shelf.stored.__getitem__, keys)) for shelf, keys in groups]
        except KeyError:
            absences = Counter(why for shelf, keys in groups for key in keys if (why := shelf.absence(key)) is not None)
            self._misses.update(absences)
            raise Missing(
                f"{request}: {absences.total()} of {sum(map(len, wanted))} blocks are not in the pool "
                f"({_listed(absences)}); recompute them"
            ) from None
        for (shelf, keys), there in zip(groups, slots, strict=True):
            shelf.pin(keys, there)
        return Lease(self._id("lease"), request, tuple(slots), deadline)

    def renew(self, lease: Lease) -> None:
        """Give a lease its full time again. Raises Missing if it has ended."""
        self.expire(self.clock())
        if lease.state is not LeaseState.HELD:
            raise Missing(f"{lease.request}: its lease {lease.id} is {lease.state}; recompute the blocks")
        lease.deadline = self.clock() + self._lease_s
        self._leases.move_to_end(lease.id)

    def release(self, lease: Lease) -> None:
        """End a lease. A second call is counted and changes nothing."""
        if lease.state is LeaseState.RELEASED:
            self._counts["double_releases"] += 1
        elif lease.state is LeaseState.HELD:
            self._unpin(lease)
        lease.state = LeaseState.RELEASED

    # ---- saves ----

    def reserve(
        self, request: str, keys: Sequence[Keys], held: Sequence[Held] | None = None, tokens: Sequence[int] = ()
    ) -> Reservation:
        """Slots for those of `keys` (of each group) that are neither stored nor being saved: all of them or none.

        keys: the whole prefix, so that it is kept in one piece: none of it is evicted for the rest, and the first
        keys last to go. The lists may grow later; where something is held behind their ends, all of it gets its names
        then (`name`). held: for each group what is looked at and saved (None: all); slots ascend with the blocks, so
        that neighbours stay neighbours. tokens: as in `Change`.
        Evicts blocks that nobody leases, the least recently used first. Raises Full; then nothing but a reason changes.
        """
        self.expire(self.clock())
        if held is None:
            held = [(tuple(range(len(named))), ()) for named in keys]
        wanted: list[tuple[Shelf, Sequence[int]]] = []
        for group, ((shelf, named), (some, blocks)) in enumerate(zip(self._by_group(keys), held, strict=True)):
            indices = shelf.unknown(named, some)
            if blocks and list(blocks) != sorted(blocks):
                indices = tuple(sorted(indices, key=dict(zip(some, blocks, strict=True)).__getitem__))
            room = shelf.room()
            if len(indices) > room - len(named):  # else it need not be known how much of that is its own prefix
                room = shelf.room(named)
            if len(indices) > room:
                self._counts["saves_dropped"] += 1
                for other, chain, (asked, _) in zip(self._shelves, keys, held, strict=True):
                    other.refuse(chain[index] for index in asked if index < len(chain))
                raise Full(
                    f"{request}: {len(indices)} blocks to save in group {group}, room for {room} of "
                    f"{shelf.table.slots}; save fewer, or raise host_bytes"
                )
            wanted.append((shelf, indices))
        slots = tuple([shelf.reserve(named, indices) for (shelf, indices), named in zip(wanted, keys, strict=True)])
        names: tuple[list[bytes], ...] = tuple([] for _ in wanted)
        reservation = Reservation(self._id("save"), request, tuple([indices for _, indices in wanted]), slots, names)
        if all(not some or some[-1] < len(named) for (some, _), named in zip(held, keys, strict=True)):
            self._name(reservation, keys)
        for (shelf, _), named, (some, _) in zip(wanted, keys, held, strict=True):
            if some:
                shelf.newest(named, some[-1])
        if reservation.blocks:
            self._savings[reservation.id] = _Saving(reservation, tuple(keys), tokens)
        return reservation

    def name(self, reservation: str) -> None:
        """The lists of keys have grown: give the blocks of a reservation their names, if it has not ended.

        One that others have stored meanwhile, or are saving, gets none, and its slot is free when the save has ended.
        There is time now: room is made for the next one like it.
        """
        if (saving := self._savings.get(reservation)) is not None:
            self._name(saving.reservation, saving.chains)
            for shelf, keys, some in zip(self._shelves, saving.chains, saving.reservation.indices, strict=True):
                shelf.newest(keys, max(some, default=-1))
                shelf.spare(len(some))

    def commit(self, reservation: str, rank: int = 0) -> bool:
        """One rank has every byte of its part in place. Whether the blocks became visible by this report."""
        return self._report(reservation, {rank}, True)

    def revoke(self, reservation: str, rank: int | None = None) -> None:
        """One rank (None: every rank) has ended without its bytes and writes no more; the last one frees the slots."""
        self._report(reservation, set(range(self.ranks)) if rank is None else {rank}, False)

    def forget(self, group: int, keys: Keys) -> int:
        """Drop stored keys whose bytes turned out bad; how many there were. Nobody can lease them from now on.

        A leased one keeps its slot until its last lease ends. Keys being saved stay.
        """
        dropped = self._shelves[group].forget(keys)
        self._counts["forgotten"] += dropped
        return dropped

    # ---- time ----

    def expire(self, now: float) -> int:
        """End the leases whose deadline has come; how many. Also done by every lease and reserve."""
        ended = 0
        while self._leases and (lease := next(iter(self._leases.values()))).deadline <= now:
            self._unpin(lease)
            lease.state = LeaseState.EXPIRED
            self._counts["leases_expired"] += 1
            ended += 1
        return ended

    def check(self) -> None:
        """Raise BrokenInvariant unless every slot, lease and reservation is accounted for."""
        for group, shelf in enumerate(self._shelves):
            shelf.check(sum(len(lease.slots[group]) for lease in [*self._leases.values(), *self._kept.values()]))

    # ---- inside ----

    def _report(self, name: str, ranks: Set[int], good: bool) -> bool:
        """Count ranks that have ended; whether this made the blocks visible."""
        if not all(0 <= rank < self.ranks for rank in ranks):
            raise Refused(f"{name}: a report of rank {sorted(ranks)}, but there are {self.ranks}")
        saving = self._savings.get(name)
        if saving is None:
            self._counts["late_reports"] += 1
            return False
        saving.ended |= ranks
        saving.failed |= not good
        if len(saving.ended) < self.ranks:
            return False
        del self._savings[name]
        fresh = saving.reservation.keys
        for shelf, keys, slots in zip(self._shelves, fresh, saving.reservation.slots, strict=True):
            shelf.unreserve(slots)
            if saving.failed:
                shelf.revoke(keys)
            else:
                shelf.commit(keys)
                self._counts["saved"] += len(keys)
        if saving.failed:
            self._counts["saves_failed"] += 1
            return False
        if self.changes is not None:
            for group, (chain, indices) in enumerate(zip(saving.chains, saving.reservation.indices, strict=True)):
                named = set(fresh[group])
                visible = [index for index in indices if index < len(chain) and chain[index] in named]
                self.changes.stored(group, chain, visible, saving.tokens)
        return True

    def _name(self, reservation: Reservation, chains: Sequence[Keys]) -> None:
        every = zip(self._shelves, chains, reservation.indices, reservation.slots, reservation.keys, strict=True)
        for shelf, keys, indices, slots, names in every:
            if fresh := shelf.name(keys, indices, slots):
                if gone := shelf.gone(fresh):
                    self._misses.update(gone)
                self._misses[Absence.NEVER] += len(fresh) - len(gone)
                names.extend(fresh)

    def _unpin(self, lease: Lease) -> None:
        (self._kept if lease.id in self._kept else self._leases).pop(lease.id)
        for shelf, slots in zip(self._shelves, lease.slots, strict=True):
            shelf.unpin(slots)

    def _by_group(self, keys: Sequence[Keys]) -> Iterator[tuple[Shelf, Keys]]:
        if len(keys) != len(self._shelves):
            raise Refused(f"keys for {len(keys)} groups, but there are {len(self._shelves)}")
        return zip(self._shelves, keys, strict=True)

    def _id(self, what: str) -> str:
        return f"{what}-{next(self._numbers)}"


_COUNTED = tuple(name for name in Stats.__struct_fields__ if name not in ("misses", "evictions"))


def _listed(absences: Counter[Absence]) -> str:
    return ", ".join(f"{number} {why}" for why, number in absences.most_common())
