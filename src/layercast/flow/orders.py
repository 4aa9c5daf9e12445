"""What the scheduler side asks of the worker side in one step, and what it is told back.

Frozen values that may cross a process boundary (msgspec). Ids only: no addresses, no tensors.
Does not know keys (the directory maps them to slots) or how bytes move.
"""

from enum import StrEnum

import msgspec


class BlockPairs(msgspec.Struct, frozen=True):
    """Slots of the pool and engine blocks of one group, pair by pair. `group` is its index in the layout."""

    group: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]


class LoadOrder(msgspec.Struct, frozen=True):
    """Bring a request's cached blocks from slots into engine blocks, layer by layer.

    id: unique for each attempt (a preempted and resumed request has two). tokens: what was promised.
    window: layers moved together; 0 = all (bulk). hidden_bytes: in the background, the load is said to have come once
    no more than these are left of it and of those before it; the forwards that follow wait for it (`StepOrders.joins`).
    """

    id: str
    request: str
    tokens: int
    pairs: tuple[BlockPairs, ...]
    window: int = 1
    hidden_bytes: int = 0

    @property
    def blocks(self) -> set[int]:
        """Numbers of the engine's blocks that it fills, of all groups."""
        return {block for pair in self.pairs for block in pair.blocks}


class SaveOrder(msgspec.Struct, frozen=True):
    """Copy a request's engine blocks into reserved slots as each layer is written in this step.

    id: unique for each set of reserved slots.
    """

    id: str
    request: str
    pairs: tuple[BlockPairs, ...]


class RemotePairs(msgspec.Struct, frozen=True):
    """Engine blocks here and engine blocks of the peer, of one group, pair by pair."""

    group: int
    blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]


class PushOrder(msgspec.Struct, frozen=True):
    """Send the blocks that this step completes to the decode instance, each layer as it is written.

    transfer: minted once for the push. part: number of the part, from 0. tokens: prompt tokens that the peer holds
    once this part has landed. last: whether this is the push's last part.
    """

    transfer: str
    request: str
    part: int
    tokens: int
    pairs: tuple[RemotePairs, ...]
    last: bool


class ReceiveOrder(msgspec.Struct, frozen=True):
    """Let this step's attention wait, layer by layer, for a push that is still landing in its blocks."""

    transfer: str
    request: str
    tokens: int


class KeyedSlots(msgspec.Struct, frozen=True):
    """Slots of one group and the keys of what they hold, or are to hold."""

    group: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


class TierOrder(msgspec.Struct, frozen=True):
    """Bring blocks up from the store below the slab (`fetch`), or write them behind to it. No forward waits for it."""

    id: str
    fetch: bool
    blocks: tuple[KeyedSlots, ...]


class StepOrders(msgspec.Struct, frozen=True):
    """Everything to move during one forward.

    background: loads that this forward does not read; the engine waits for their outcome. aborts: requests of which
    nothing more need be moved. joins: requests whose background loads this forward waits for, as they have been said to
    have come and may still be landing. tier: copies to and from what lies below the slab, which no forward waits for.
    """

    step: int
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    pushes: tuple[PushOrder, ...] = ()
    receives: tuple[ReceiveOrder, ...] = ()
    background: tuple[LoadOrder, ...] = ()
    aborts: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    tier: tuple[TierOrder, ...] = ()


class LoadEnd(StrEnum):
    """How a load ended."""

    LANDED = "landed"
    CORRUPT = "corrupt"
    LOST = "lost"
    LATE = "late"
    ABORTED = "aborted"


class LoadOutcome(msgspec.Struct, frozen=True):
    """One load's end.

    exposed_s: time that forwards waited for it; None = not known, as a device's stream waited by itself. bad_slots:
    slots whose digest differs, by group. pieces: copies that the bytes took.
    """

    id: str
    request: str
    end: LoadEnd
    nbytes: int
    layers: int
    verified: bool
    transfer_s: float
    exposed_s: float | None
    reason: str = ""
    bad_slots: tuple[tuple[int, int], ...] = ()
    pieces: int = 0


class SaveOutcome(msgspec.Struct, frozen=True):
    """One save's end on this rank: every layer covered, or why not.

    pieces: copies that the bytes took, and those of the saves of its step that are told behind it with 0.
    """

    id: str
    request: str
    saved: bool
    nbytes: int
    layers: int
    swept_layers: int
    reason: str = ""
    pieces: int = 0


class TierOutcome(msgspec.Struct, frozen=True):
    """One order's end on this rank: done in full, or why not. seconds: what the copies took."""

    id: str
    fetch: bool
    done: bool
    nbytes: int
    seconds: float
    reason: str = ""


class StepReport(msgspec.Struct, frozen=True):
    """What ended since the last report. A save may be reported some steps after its order.

    failed: requests whose loaded KV must not be used, known at the step's end. A failed load whose copies may still
    land has no outcome yet: its blocks stay untouched until the outcome comes with a later report. halted: why this
    rank moves nothing any more. staging_bytes: as `Mover.staging_bytes`.
    """

    step: int
    failed: tuple[str, ...] = ()
    loads: tuple[LoadOutcome, ...] = ()
    saves: tuple[SaveOutcome, ...] = ()
    tier: tuple[TierOutcome, ...] = ()
    halted: str = ""
    staging_bytes: int = 0
