"""Why nothing of a prompt can be loaded, as far as its keys tell. Pure.

Does not know the pool, nor what was decided on what can be.
"""

from collections.abc import Callable, Mapping, Sequence

from layercast.control.names import Chain
from layercast.control.shelf import Absence
from layercast.observe.receipts import MissReason
from layercast.plan.prefix import BOUNDED
from layercast.spec.groups import GroupSpec

_REASONS: Mapping[Absence | None, MissReason] = {
    Absence.CORRUPT: MissReason.CORRUPT,
    Absence.EVICTED: MissReason.EVICTED,
    Absence.NO_ROOM: MissReason.NO_ROOM,
    Absence.SAVING: MissReason.SAVING,
    None: MissReason.TOO_LITTLE,
}
"""By what is absent, what a user can do something about first; None: something is there."""


def why_missed(
    specs: Sequence[GroupSpec],
    keys: Sequence[Chain],
    there: Sequence[Sequence[bool]],
    local_tokens: int,
    absences: Callable[[int, Sequence[bytes]], Sequence[Absence | None]],
) -> MissReason:
    """The reason by the first block of each group and the first that is absent: a look at all would cost each request.

    Of a group that keeps few of a prompt's blocks all that were looked for count. there: as `presence` found them.
    The prompt has a token behind the first block of each. local_tokens: of it, those that the engine holds. absences:
    of a group's keys, None where it is there.
    """
    found = set[Absence | None]()
    for group, (spec, chain, has) in enumerate(zip(specs, keys, there, strict=True)):
        ends = range(len(chain.known)) if spec.kind in BOUNDED else {0, len(has)}
        found.update(absences(group, [chain.upto(at + 1)[at] for at in ends if at < len(chain)]))
    if None in found and local_tokens:
        return MissReason.HELD
    for absence, reason in _REASONS.items():
        if absence in found:
            return reason
    return MissReason.NEVER_STORED
