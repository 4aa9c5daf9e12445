"""How many leading tokens of a prompt can be used, given what each group has, and which blocks that takes.

A boundary counts only if it is valid in all groups: it ends a block of each; full and latent groups have every block
before it, a window group the blocks its window can reach, a recurrent group the snapshot exactly there.
Does not know keys, tiers or where blocks lie.
"""

from collections.abc import Sequence
from math import lcm

import msgspec

from layercast.errors import Refused
from layercast.spec.groups import GroupKind, GroupSpec

BOUNDED = (GroupKind.WINDOW, GroupKind.RECURRENT)
"""Groups that need only some of the blocks before a boundary."""


class Usable(msgspec.Struct, frozen=True):
    """Tokens that need no computing, and for each group the indices of the blocks to bring in for that, ascending.

    Block i covers tokens [i * block_size, (i + 1) * block_size); in a recurrent group it is the snapshot at its end.
    """

    tokens: int
    needed: tuple[range, ...]


def window_blocks(window: int, block_size: int) -> int:
    """Most blocks that a window of tokens touches, wherever it begins."""
    return -(-(window + block_size - 1) // block_size)


def usable_prefix(
    specs: Sequence[GroupSpec],
    present: Sequence[Sequence[bool]],
    prompt_tokens: int,
    local_tokens: int = 0,
) -> Usable:
    """The longest prefix whose KV is there in all groups.

    present[g][i]: whether block (or snapshot) i of group g can be brought in; missing entries are absent.
    At least one token is left to compute, as a request needs its logits.
    local_tokens: leading tokens that the engine holds already. Blocks wholly below them are not needed again; where
    nothing beyond them is usable the answer is them, with nothing needed.
    """
    if len(specs) != len(present) or not specs:
        raise Refused(f"{len(specs)} groups, but presence of {len(present)}: one sequence for each group")
    step = lcm(*(spec.block_size for spec in specs))
    most = max(0, prompt_tokens - 1)
    groups = [(spec, has, local_tokens // spec.block_size) for spec, has in zip(specs, present, strict=True)]
    boundary = min(most, *(spec.block_size * _end(spec, has, local) for spec, has, local in groups))
    while (boundary := boundary - boundary % step) > local_tokens:
        spans = [
            (max(_first(spec, boundary // spec.block_size), local), boundary // spec.block_size)
            for spec, _, local in groups
        ]
        gaps = [
            _absent(has, first, end) if spec.kind in BOUNDED else end
            for (spec, has, _), (first, end) in zip(groups, spans, strict=True)
        ]
        if all(gap == end for gap, (_, end) in zip(gaps, spans, strict=True)):
            return Usable(boundary, tuple(range(first, end) for first, end in spans))
        boundary = min(spec.block_size * gap for spec, gap in zip(specs, gaps, strict=True))
    return Usable(min(local_tokens, most), (range(0),) * len(specs))


def lengthening(
    specs: Sequence[GroupSpec],
    here: Sequence[Sequence[bool]],
    there: Sequence[Sequence[bool]],
    prompt_tokens: int,
    least: int,
) -> tuple[tuple[int, ...], ...]:
    """Blocks, by group, that are not `here` but `there`, and with which `least` more tokens (or one) can be used.

    Nothing where they would not bring that much.
    """
    either = [[one or other for one, other in zip(*both, strict=True)] for both in zip(here, there, strict=True)]
    longer = usable_prefix(specs, either, prompt_tokens)
    if longer.tokens - usable_prefix(specs, here, prompt_tokens).tokens < max(1, least):
        return ((),) * len(specs)
    return tuple(tuple(i for i in needed if not has[i]) for needed, has in zip(longer.needed, here, strict=True))


def _first(spec: GroupSpec, end: int) -> int:
    """The first block that a query at the start of block `end` depends on."""
    if spec.kind is GroupKind.RECURRENT:
        return end - 1
    if spec.kind is GroupKind.WINDOW:
        if spec.window is None:
            raise Refused(f"group {spec.name!r}: a window group must say how many tokens its window has")
        return max(0, end - window_blocks(spec.window, spec.block_size))
    return 0


def _end(spec: GroupSpec, has: Sequence[bool], local: int) -> int:
    """Behind the last block at which a prefix could end; blocks below `local` are there."""
    end = max(local, len(has))
    return end if spec.kind in BOUNDED else _absent(has, local, end)


def _absent(has: Sequence[bool], first: int, end: int) -> int:
    """The first block in [first, end) that is absent; `end` if none is."""
    at = bytes(has[first:end]).find(False)  # a third of what a look at each takes
    return end if at < 0 else first + at
