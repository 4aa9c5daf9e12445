"""One group's part of the directory: which key lies in which slot, and which block goes next when room is needed.

A block is being saved (in `saving`; in `unnamed` until its key is known), stored (in `stored`), or detached: dropped
from its key while leases still hold its slot. What was saved as one stretch of a prompt is a run; runs form a tree, and
a use of a block is one of its run and those before it, so a prefix ages as one, tail before head, at no cost a block.
Does not know requests, deadlines, ranks or the other groups.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from layercast.errors import BrokenInvariant
from layercast.store.slots import SlotTable

AHEAD_SHARE = 16
"""A part of the slots: so many are freed ahead of need."""


class Absence(StrEnum):
    """Why a key can't be loaded."""

    NEVER = "never stored"
    EVICTED = "evicted"
    CORRUPT = "corrupt"
    SAVING = "being saved"
    NO_ROOM = "not saved for want of room"


@dataclass(slots=True, eq=False)
class _Run:
    """Neighbours in a prompt, in its order. before: the run that they continue, at its end.

    ended: another run continues this one.
    """

    keys: list[bytes]
    before: "_Run | None"
    ended: bool = False


class Pins(set[int]):
    """Slots that leases hold. more: of those that several hold, how often beyond once."""

    def __init__(self) -> None:
        self.more: Counter[int] = Counter()

    def hold(self, slots: Sequence[int]) -> None:
        """A lease holds them."""
        before, new = len(self), slots if self.isdisjoint(slots) else set(slots) - self
        self.update(new)
        if len(self) - before < len(slots):
            self.more.update(slots)
            self.more.subtract(set(new))

    def let_go(self, slots: Sequence[int]) -> None:
        """A lease has ended that held them."""
        if not self.more:
            self.difference_update(slots)
            return
        for slot in slots:
            if self.more[slot] > 0:
                self.more[slot] -= 1
            else:
                self.discard(slot)
        self.more = +self.more


class Gone(dict[bytes, Absence]):
    """Why keys were dropped, or not saved, of the last `most`."""

    def __init__(self, most: int) -> None:
        self._most = most

    def note(self, keys: Iterable[bytes], why: Absence) -> None:
        """They are absent for that reason."""
        self.update(dict.fromkeys(keys, why))
        for key in list(islice(self, max(0, len(self) - self._most))):
            del self[key]


class Shelf:
    """Keys and slots of one group. `remember`: how many dropped keys it can still give a reason for."""

    def __init__(self, slots: int, remember: int) -> None:
        self.table = SlotTable(slots)
        self.saving: dict[bytes, int] = {}
        self.unnamed: set[int] = set()
        self.stored: dict[bytes, int] = {}
        self.pins = Pins()
        self.detached: set[int] = set()
        self.evictions = 0
        self.dropped: Callable[[Sequence[bytes]], None] | None = None
        """Told of keys that can't be found any more."""
        self.version = 0
        """Another one whenever `has`, or `absence`, may answer otherwise."""
        self._gone = Gone(remember)
        self._runs: OrderedDict[_Run, None] = OrderedDict()
        """The next to lose its last block first."""
        self._run_of: dict[bytes, _Run] = {}
        """Of each key that is stored or being saved."""

    def absence(self, key: bytes) -> Absence | None:
        """Why `key` can't be loaded; None if it can."""
        if key in self.stored:
            return None
        return Absence.SAVING if key in self.saving else self._gone.get(key, Absence.NEVER)

    def gone(self, keys: Iterable[bytes]) -> list[Absence]:
        """Why those of the keys were dropped that were."""
        return [self._gone[key] for key in keys if key in self._gone]

    def unknown(self, keys: Sequence[bytes], indices: Sequence[int]) -> Sequence[int]:
        """Those of the ascending indices whose keys are neither stored nor being saved, or not known yet.

        Of a repeated key it is the first one.
        """
        there, fresh, end = self._run_of, dict[bytes, int](), bisect_left(indices, len(keys))
        for index in indices[:end]:
            if (key := keys[index]) not in there:
                fresh.setdefault(key, index)
        return indices if len(fresh) == end else (*fresh.values(), *indices[end:])

    def has(self, coming: bool = False) -> Callable[[bytes], bool]:
        """Whether a key is stored. coming: or being saved."""
        return (self._run_of if coming else self.stored).__contains__

    def room(self, spare: Iterable[bytes] = ()) -> int:
        """Slots that are free or could be made so without evicting a key of `spare`."""
        idle = len(self.stored) - len(self.pins) + len(self.detached)
        own = sum(key in self.stored and self.stored[key] not in self.pins for key in set(spare))
        return self.table.free_count + idle - own

    def reserve(self, keys: Sequence[bytes], indices: Sequence[int]) -> tuple[int, ...]:
        """Slots for `keys[i]`, evicting others but no other one of `keys`. The caller has checked `room(keys)`.

        They have no names yet: `name` gives them these, and the caller then says by `touch` what has been used.
        """
        if not indices:
            return ()
        at, behind = self._before(keys, min(indices)), max(indices) + 1
        before = keys[at] if at >= 0 else None
        if len(indices) > self.table.free_count:
            # once it is touched, what is spared goes last, and need not be looked for where that is all of it
            last = len(keys) <= behind == at + 1 + len(indices)
            whole = last and (0 if before is None else self.touch(before)) == at + 1
            self._evict(len(indices) - self.table.free_count, () if whole else keys)
        slots = self.table.allocate(len(indices), self._slot_behind(before))
        self.unnamed.update(slots)
        return slots

    def name(self, keys: Sequence[bytes], indices: Sequence[int], slots: Sequence[int]) -> list[bytes]:
        """Reserved slots become those of `keys[i]`, of which not all need be known; which keys have got one now.

        They are in the order of the prompt. One that is stored or being saved already gets none.
        """
        if not isinstance(indices, range) and list(indices) != sorted(indices):
            indices, slots = zip(*sorted(zip(indices, slots, strict=True)), strict=True)
        end = bisect_left(indices, len(keys))
        fresh = dict(zip(map(keys.__getitem__, indices[:end]), slots, strict=False))
        for key in fresh.keys() & self._run_of.keys():
            del fresh[key]
        if fresh:
            self.unnamed.difference_update(fresh.values())
            self.saving.update(fresh)
            named = indices[:end]
            if len(fresh) < end:
                named = [index for index in named if keys[index] in fresh]
            at, behind = self._before(keys, named[0]), named[-1] + 1
            before, after = keys[at] if at >= 0 else None, keys[behind] if behind < len(keys) else None
            self._list(list(fresh), before, after)
        return list(fresh)

    def commit(self, keys: Sequence[bytes]) -> None:
        """Make saved blocks visible under their keys."""
        self.version += 1
        self.stored.update(zip(keys, map(self.saving.pop, keys), strict=True))
        for key in self._gone.keys() & keys:
            del self._gone[key]

    def revoke(self, keys: Sequence[bytes]) -> None:
        """Take back the slots of blocks whose save failed."""
        self._unlist(keys)
        self.table.free([self.saving.pop(key) for key in keys])

    def unreserve(self, slots: Sequence[int]) -> None:
        """Take back those of some reserved slots that have no name: their save has ended."""
        if self.unnamed and (left := self.unnamed.intersection(slots)):
            self.unnamed -= left
            self.table.free(left)

    def refuse(self, keys: Iterable[bytes]) -> None:
        """There is no room to save those of the keys that are absent; what begins the prompt is forgotten last."""
        self.version += 1
        absent = [key for key in keys if key not in self._run_of]
        self._gone.note(reversed(absent), Absence.NO_ROOM)

    def spare(self, count: int) -> None:
        """Have so many slots free, as far as that is a small part of all: so who needs them next need not evict."""
        short = min(count, self.table.slots // AHEAD_SHARE, self.room()) - self.table.free_count
        if short > 0:
            self._evict(short, ())

    def touch(self, key: bytes) -> int:
        """Count a block that is stored or being saved, and all before it, as just used, the first last to go.

        How many these are.
        """
        run: _Run | None = self._ending(key)
        blocks = 0
        while run is not None:
            if run in self._runs:
                self._runs.move_to_end(run)
                blocks += len(run.keys)
            run = run.before
        return blocks

    def pin(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Keep stored keys where they are, in these slots, until `unpin`."""
        self.pins.hold(slots)
        if keys:
            self.touch(keys[-1])

    def unpin(self, slots: Sequence[int]) -> None:
        """Let go of leased blocks; the last lease on a dropped one frees its slot."""
        self.pins.let_go(slots)
        if self.detached:
            freed = self.detached.intersection(slots) - self.pins
            self.detached -= freed
            self.table.free(freed)

    def forget(self, keys: Iterable[bytes], why: Absence = Absence.CORRUPT) -> int:
        """Drop the stored ones of some keys now; a slot is free once nobody leases it. How many were stored."""
        stored = [key for key in dict.fromkeys(keys) if key in self.stored]
        self._unlist(stored)
        self._drop(stored, why)
        return len(stored)

    def check(self, leases: int) -> None:
        """Raise BrokenInvariant unless every slot is in exactly one place and `leases` pins are held."""
        held = [*self.saving.values(), *self.unnamed, *self.stored.values(), *self.detached]
        listed = [key for run in self._runs for key in run.keys]
        facts = {
            "free and used slots add up to all": self.table.free_count + len(held) == self.table.slots,
            "no slot is used twice": len(set(held)) == len(held),
            "no key is both stored and being saved": not self.saving.keys() & self.stored.keys(),
            "every key is in one run": sorted(listed) == sorted([*self.saving, *self.stored])
            and all(self._run_of[key] is run for run in self._runs for key in run.keys),
            "no run is empty": all(run.keys for run in self._runs),
            "every pin has a lease": len(self.pins) + self.pins.more.total() == leases
            and self.pins.more.keys() <= self.pins,
            "only what is stored or dropped is leased": self.pins <= {*self.stored.values(), *self.detached},
            "a dropped block is kept for a lease only": self.detached <= self.pins,
        }
        broken = [fact for fact, holds in facts.items() if not holds]
        if broken:
            raise BrokenInvariant(f"the directory is inconsistent, please report this: not true: {'; '.join(broken)}")

    def _evict(self, count: int, spare: Iterable[bytes]) -> None:
        """Drop `count` idle blocks, from the end of the runs that were used least recently."""
        spared, stored, pins = set(spare), self.stored, self.pins
        victims: list[bytes] = []
        empty: list[_Run] = []
        for run in self._runs:
            kept: list[bytes] = []
            tail = run.keys[len(victims) - count :]
            slots = list(map(stored.get, tail))
            if None not in slots and pins.isdisjoint(slots) and spared.isdisjoint(tail):  # the usual case
                del run.keys[-len(tail) :]
                victims += reversed(tail)
            while run.keys and len(victims) < count:
                key = run.keys.pop()
                idle = key in stored and stored[key] not in pins and key not in spared
                (victims if idle else kept).append(key)
            run.keys += reversed(kept)
            if not run.keys:
                empty.append(run)
            if len(victims) == count:
                break
        for run in empty:
            del self._runs[run]
        for key in victims:
            del self._run_of[key]
        self._drop(victims, Absence.EVICTED)
        self.evictions += count

    def _drop(self, keys: Sequence[bytes], why: Absence) -> None:
        """Take blocks from their keys; slots that nobody leases are free, the others once nobody does."""
        self.version += 1
        self._gone.note(keys, why)
        if self.dropped is not None:
            self.dropped(keys)
        slots = set(map(self.stored.pop, keys))
        leased = slots & self.pins
        self.detached |= leased
        self.table.free(slots - leased)

    def _list(self, keys: list[bytes], before: bytes | None, behind: bytes | None) -> None:
        """Enter new keys. before, behind: the keys around them in their prompt, if any are there."""
        self.version += 1
        run = None if before is None else self._ending(before)
        if run is None or run.ended:
            above, run = run, _Run(keys, run)
            after = None if behind is None else self._run_of.get(behind)
            if after is not None and after.before is above:  # what had been dropped from between these is back
                after.before, run.ended = run, True
            elif after is not None and after.before is not None and self._left_of(after.before) is above:
                run = after.before  # a run that had been dropped is back, for all that continue it
                run.keys, run.before = keys, above
            self._runs[run] = None
        else:
            run.keys += keys
        self._run_of.update(dict.fromkeys(keys, run))

    def _unlist(self, keys: Iterable[bytes]) -> None:
        """Take keys out of their runs."""
        self.version += 1
        for run in {self._run_of.pop(key) for key in keys}:
            run.keys = [key for key in run.keys if key in self._run_of]
            if not run.keys:
                del self._runs[run]

    def _left_of(self, run: _Run | None) -> _Run | None:
        """The run, or the next one before it of which something is there."""
        while run is not None and run not in self._runs:
            run = run.before
        return run

    def _ending(self, key: bytes) -> _Run:
        """The run that ends with a key; what follows the key there becomes another one, which continues it."""
        run = self._run_of[key]
        if run.keys[-1] == key:
            return run
        at = run.keys.index(key) + 1
        head = _Run(run.keys[:at], run.before, ended=True)
        run.keys, run.before = run.keys[at:], head
        self._runs[head] = None
        self._run_of.update(dict.fromkeys(head.keys, head))
        return head

    def newest(self, keys: Sequence[bytes], index: int) -> None:
        """As `touch`, for the last of `keys[: index + 1]` that is there, if any is."""
        if (at := self._before(keys, index + 1)) >= 0:
            self.touch(keys[at])

    def _before(self, keys: Sequence[bytes], index: int) -> int:
        """The last index before this one whose key is stored or being saved; -1: none."""
        at = min(index, len(keys)) - 1
        while at >= 0 and keys[at] not in self._run_of:
            at -= 1
        return at

    def _slot_behind(self, key: bytes | None) -> int | None:
        """The slot behind the one of a key, so that a chat's blocks lie in one run."""
        if key is None:
            return None
        return 1 + (self.stored[key] if key in self.stored else self.saving[key])
