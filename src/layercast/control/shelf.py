"""One group's part of the directory: which key lies in which slot, and which block goes next when room is needed.

A block is being saved (in `saving`), stored (in `stored`; in `idle` too while nobody leases it), or detached: dropped
from its key while leases still hold its slot. Does not know requests, deadlines, ranks or the other groups.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from layercast.errors import BrokenInvariant
from layercast.store.slots import SlotTable


class Absence(StrEnum):
    """Why a key can't be loaded."""

    NEVER = "never stored"
    EVICTED = "evicted"
    CORRUPT = "corrupt"
    SAVING = "being saved"


@dataclass(slots=True, eq=False)
class Block:
    """A slot with a key, and how many leases hold it."""

    key: bytes
    slot: int
    leases: int = 0


class Shelf:
    """Keys and slots of one group. `remember`: how many dropped keys it can still give a reason for."""

    def __init__(self, slots: int, remember: int) -> None:
        self.table = SlotTable(slots)
        self.saving: dict[bytes, Block] = {}
        self.stored: dict[bytes, Block] = {}
        self.idle: OrderedDict[bytes, Block] = OrderedDict()
        """Stored and not leased, the next to go first."""
        self.detached: set[Block] = set()
        self.evictions = 0
        self.dropped: Callable[[Sequence[bytes]], None] | None = None
        """Told of keys that can't be found any more."""
        self._remember = remember
        self._gone: OrderedDict[bytes, Absence] = OrderedDict()

    def absence(self, key: bytes) -> Absence | None:
        """Why `key` can't be loaded; None if it can."""
        if key in self.stored:
            return None
        return Absence.SAVING if key in self.saving else self._gone.get(key, Absence.NEVER)

    def unknown(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Indices of the keys neither stored nor being saved; a repeated key counts once."""
        first: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if key not in self.stored and key not in self.saving:
                first.setdefault(key, index)
        return tuple(first.values())

    def room(self, spare: Iterable[bytes] = ()) -> int:
        """Slots that are free or could be made so without evicting a key of `spare`."""
        return self.table.free_count + len(self.idle) - sum(key in self.idle for key in set(spare))

    def reserve(self, keys: Sequence[bytes], indices: Sequence[int]) -> list[Block]:
        """Slots for `keys[i]`, evicting others. The caller has checked `room(keys)`."""
        self.touch(keys)
        victims = [self.idle.popitem(last=False) for _ in range(len(indices) - self.table.free_count)]
        self._drop([block for _, block in victims], Absence.EVICTED)
        self.evictions += len(victims)
        slots = self.table.allocate(len(indices), self._slot_after(keys, indices))
        blocks = [Block(keys[index], slot) for index, slot in zip(indices, slots, strict=True)]
        self.saving.update((block.key, block) for block in blocks)
        return blocks

    def commit(self, blocks: Iterable[Block]) -> None:
        """Make saved blocks visible under their keys."""
        for block in blocks:
            self.stored[block.key] = self.idle[block.key] = self.saving.pop(block.key)
            self._gone.pop(block.key, None)

    def revoke(self, blocks: Sequence[Block]) -> None:
        """Take back the slots of blocks whose save failed."""
        for block in blocks:
            del self.saving[block.key]
        self.table.free(block.slot for block in blocks)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count `keys` as just used, the first last to go: a prefix without its head is worth nothing."""
        for key in reversed(keys):
            if key in self.idle:
                self.idle.move_to_end(key)

    def pin(self, keys: Sequence[bytes]) -> list[Block]:
        """Keep stored keys where they are until `unpin`. The caller has checked that they are stored."""
        blocks = [self.stored[key] for key in keys]
        for block in blocks:
            block.leases += 1
            self.idle.pop(block.key, None)
        return blocks

    def unpin(self, blocks: Sequence[Block]) -> None:
        """Let go of leased blocks; the last lease on a dropped one frees its slot."""
        for block in reversed(blocks):
            block.leases -= 1
            if block.leases:
                continue
            if block in self.detached:
                self.detached.remove(block)
                self.table.free((block.slot,))
            else:
                self.idle[block.key] = block

    def forget(self, key: bytes, why: Absence = Absence.CORRUPT) -> bool:
        """Drop a stored key now; its slot is free once nobody leases it. Whether it was stored."""
        block = self.stored.get(key)
        if block is not None:
            self.idle.pop(key, None)
            self._drop([block], why)
        return block is not None

    def check(self, leases: int) -> None:
        """Raise BrokenInvariant unless every slot is in exactly one place and `leases` pins are held."""
        held = [*self.saving.values(), *self.stored.values(), *self.detached]
        idle = {key for key, block in self.stored.items() if not block.leases}
        facts = {
            "free and used slots add up to all": self.table.free_count + len(held) == self.table.slots,
            "no slot is used twice": len({block.slot for block in held}) == len(held),
            "no key is both stored and being saved": not self.saving.keys() & self.stored.keys(),
            "idle is what is stored and not leased": idle == self.idle.keys(),
            "every pin has a lease": sum(block.leases for block in held) == leases,
            "a dropped block is kept for a lease only": all(block.leases > 0 for block in self.detached),
        }
        broken = [fact for fact, holds in facts.items() if not holds]
        if broken:
            raise BrokenInvariant(f"the directory is inconsistent, please report this: not true: {'; '.join(broken)}")

    def _drop(self, blocks: Sequence[Block], why: Absence) -> None:
        """Take blocks from their keys; slots that nobody leases are freed together, which is quicker."""
        for block in blocks:
            del self.stored[block.key]
            self._gone[block.key] = why
            self._gone.move_to_end(block.key)
            if len(self._gone) > self._remember:
                self._gone.popitem(last=False)
        if self.dropped is not None:
            self.dropped([block.key for block in blocks])
        self.detached.update(block for block in blocks if block.leases)
        self.table.free(block.slot for block in blocks if not block.leases)

    def _slot_after(self, keys: Sequence[bytes], indices: Sequence[int]) -> int | None:
        """The slot behind the one of the key before the first new one, so that a chat's blocks lie in one run."""
        if not indices or indices[0] == 0:
            return None
        before = keys[indices[0] - 1]
        block = self.stored.get(before) or self.saving.get(before)
        return None if block is None else block.slot + 1
