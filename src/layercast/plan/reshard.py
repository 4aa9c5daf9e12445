"""Resharding: which rank a target takes which heads from, for any pair of tensor- and pipeline-parallel sizes.

A cut is a pure value. Of several sources that hold the same head (replicas, a latent cache) the one that serves most
of what is still wanted is taken; equals take turns by layer and by target, so that no rank's link carries it all.
Storing a replicated cache once is the same question with one target that holds everything.
Does not know blocks, addresses or the wire; `route_of` joins a cut to the planes of two sides.
"""

from collections.abc import Iterable, Sequence

import msgspec

from layercast.errors import LayoutMismatch, WholeBlocksOnly
from layercast.plan.columns import Columns, columns_of, merged_columns
from layercast.plan.pieces import Route
from layercast.plan.segments import Cuts, matched_segments
from layercast.spec.groups import Group
from layercast.spec.planes import HEAD, Plane, PlaneKind
from layercast.spec.shards import Shard

REPLICATED = frozenset({PlaneKind.LATENT, PlaneKind.ROPE, PlaneKind.INDEXER})
"""Planes that every rank holds in full, where they have no head axis."""


class Cut(msgspec.Struct, frozen=True):
    """Heads of one layer that one source gives to one target; head numbers are indices into each side's shard.

    whole: it is all that both sides hold. leads: it is the layer's first cut for this target, and brings the planes
    that every rank holds in full.
    """

    source: int
    target: int
    layer: int
    source_head: int
    target_head: int
    heads: int
    whole: bool
    leads: bool


def cuts_to(target: Shard, sources: Sequence[Shard]) -> tuple[Cut, ...]:
    """The cuts that fill every head of every layer of the target once.

    Raises LayoutMismatch where no source holds a layer or a head.
    """
    lost = sorted(set(target.layers).difference(*(source.layers for source in sources)))
    if lost:
        raise LayoutMismatch(f"target rank {target.rank}: no source holds layers {lost}; wait for every source rank")
    return tuple(cut for nth, layer in enumerate(target.layers) for cut in _layer_cuts(target, sources, layer, nth))


def _layer_cuts(target: Shard, sources: Sequence[Shard], layer: int, nth: int) -> list[Cut]:
    cuts: list[Cut] = []
    head = target.first_head
    while head < target.last_head:
        holders = [source for source in sources if source.holds(layer, head)]
        if not holders:
            raise LayoutMismatch(f"target rank {target.rank}: no source holds head {head} of layer {layer}")
        reach = max(min(holder.last_head, target.last_head) for holder in holders)
        equals = [holder for holder in holders if holder.last_head >= reach]
        source = equals[(target.rank + nth) % len(equals)]
        cuts.append(
            Cut(
                source=source.rank,
                target=target.rank,
                layer=layer,
                source_head=head - source.first_head,
                target_head=head - target.first_head,
                heads=reach - head,
                whole=reach - head == source.heads == target.heads,
                leads=not cuts,
            )
        )
        head = reach
    return cuts


def route_of(cuts: Iterable[Cut], source: Group, target: Group) -> Route:
    """The route for the cuts between one source rank's and one target rank's planes of a group.

    Raises LayoutMismatch where a layer is missing or planes differ in more than their heads, WholeBlocksOnly where a
    plane can't be cut by heads.
    """
    parts: dict[int, list[Columns]] = {}
    for cut in cuts:
        parts.setdefault(cut.layer, []).extend(_cut_columns(cut, source, target))
    columns = {layer: merged_columns(parts[layer]) for layer in sorted(parts)}
    return Route(source.name, source.blocks, target.blocks, columns)


def _cut_columns(cut: Cut, source: Group, target: Group) -> list[Columns]:
    ours, theirs = source.planes_of(cut.layer), target.planes_of(cut.layer)
    if not ours or [(p.kind, p.dtype) for p in ours] != [(p.kind, p.dtype) for p in theirs]:
        raise LayoutMismatch(
            f"{source.name}, layer {cut.layer}: the two sides hold different planes:"
            f" {[(p.name, p.kind, p.dtype) for p in ours]} / {[(p.name, p.kind, p.dtype) for p in theirs]}"
        )
    columns = []
    for mine, other in zip(ours, theirs, strict=True):
        heads = _plane_cut(cut, mine)
        if heads is not None:
            from_, to, length = matched_segments(mine, other, heads)
            columns.append(
                columns_of(mine.base + from_, other.base + to, length, mine.block_stride, other.block_stride)
            )
    return columns


def _plane_cut(cut: Cut, plane: Plane) -> Cuts | None:
    """The cut along a plane's axes; None where another cut of this layer brings the plane."""
    if plane.axis(HEAD) is not None:
        return {HEAD: (cut.source_head, cut.target_head, cut.heads)}
    if plane.kind in REPLICATED or cut.whole:
        return {} if cut.leads else None
    raise WholeBlocksOnly(f"{plane.name}: has no head axis, so it moves only between ranks that hold the same heads")
