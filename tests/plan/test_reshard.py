from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercast.errors import LayoutMismatch, WholeBlocksOnly
from layercast.plan.pieces import COLUMNS
from layercast.plan.reshard import cuts_to, route_of
from layercast.spec.groups import GroupKind, GroupSpec, layout_of
from layercast.spec.planes import PlaneKind, plane_of_tensor
from layercast.spec.shards import Shard, shards_of

TOKENS, WIDTH, BLOCKS = 3, 4, 5


def oracle(layer: int, block: int, token: int, head: int, channel: int, plane: int) -> int:
    """A byte as a pure function of what it stands for."""
    return hash((layer, block, token, head, channel, plane)) % 251 + 1


def filled(shard: Shard, kinds, order, *, empty=False, first_block=0):
    """Memory of one rank and its group. kinds: (kind, has a head axis, replicated); order: axes in memory."""
    planes, parts, at = [], [], 0
    for layer in shard.layers:
        for nth, (kind, by_head) in enumerate(kinds):
            heads = range(shard.first_head, shard.last_head) if by_head else [0]
            logical = np.array(
                [
                    [[[oracle(layer, b, t, h, c, nth) for c in range(WIDTH)] for t in range(TOKENS)] for h in heads]
                    for b in range(first_block, first_block + BLOCKS)
                ],
                np.uint8,
            )
            if empty:
                logical[:] = 0
            physical = np.ascontiguousarray(logical.transpose(order))
            view = physical.transpose(np.argsort(order))
            shape, strides, axes = list(view.shape), list(view.strides), ["block", "head", "token", "content"]
            if not by_head:
                del shape[1], strides[1], axes[1]
            planes.append(plane_of_tensor(f"{layer}.{nth}", layer, kind, "uint8", at, shape, strides, axes))
            parts.append(physical.ravel())
            at += physical.size
    spec = GroupSpec("g", GroupKind.FULL, TOKENS, shard.layers)
    return np.concatenate(parts), layout_of([spec], planes).groups[0]


FAMILIES = {
    "kv": [(PlaneKind.KV, True)],
    "k+v+indexer": [(PlaneKind.KEY, True), (PlaneKind.VALUE, True), (PlaneKind.INDEXER, False)],
    "mla": [(PlaneKind.LATENT, False), (PlaneKind.ROPE, False)],
}
HEAD_FIRST, TOKEN_FIRST, HEAD_OUTER = (0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)


def reshard_and_check(heads, layers, from_, to, family, orders):
    """Copy blocks 0..4 of all sources onto every target; each target byte once, from the right byte."""
    kinds = FAMILIES[family]
    sources = {shard.rank: shard for shard in shards_of(heads, layers, *from_)}
    held = {rank: filled(shard, kinds, orders[0]) for rank, shard in sources.items()}
    for target in shards_of(heads, layers, *to):
        wanted, _ = filled(target, kinds, orders[1])
        memory, group = filled(target, kinds, orders[1], empty=True)
        cuts = cuts_to(target, list(sources.values()))
        times = np.zeros(len(memory), np.int64)
        by_source = defaultdict(list)
        for cut in cuts:
            by_source[cut.source].append(cut)
        for rank, mine in by_source.items():
            plan = route_of(mine, held[rank][1], group).plan(range(BLOCKS), range(BLOCKS))
            pieces = plan.window(plan.layers)
            for a, b, n, rows, da, db in zip(*(getattr(pieces, name).tolist() for name in COLUMNS), strict=True):
                for row in range(rows):
                    memory[b + row * db : b + row * db + n] = held[rank][0][a + row * da : a + row * da + n]
                    times[b + row * db : b + row * db + n] += 1
        assert (times == 1).all()
        assert np.array_equal(memory, wanted)


@settings(max_examples=120, deadline=None)
@given(
    heads=st.integers(1, 16),
    tp=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    pp=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    family=st.sampled_from(sorted(FAMILIES)),
    orders=st.tuples(*[st.sampled_from([HEAD_FIRST, TOKEN_FIRST, HEAD_OUTER])] * 2),
)
def test_every_target_byte_comes_once_from_the_right_byte(heads, tp, pp, family, orders):
    layers = (0, 2, 48)
    heads = 1 if family == "mla" else heads
    reshard_and_check(heads, layers, (tp[0], pp[0]), (tp[1], pp[1]), family, orders)


def test_every_tensor_parallel_pair_gives_every_head_once():
    for heads in range(1, 17):
        for from_size in range(1, 9):
            sources = shards_of(heads, (0,), from_size)
            for to_size in range(1, 9):
                for target in shards_of(heads, (0,), to_size):
                    got = []
                    for cut in cuts_to(target, sources):
                        source = sources[cut.source]
                        first = source.first_head + cut.source_head
                        assert first - target.first_head == cut.target_head
                        assert first + cut.heads <= source.last_head
                        got += range(first, first + cut.heads)
                    assert got == list(range(target.first_head, target.last_head))


def test_a_shard_that_stays_as_it_is_moves_in_whole_cuts():
    shards = shards_of(8, (0, 1), 4)
    for target in shards:
        cuts = cuts_to(target, shards)
        assert [(cut.source, cut.whole, cut.heads) for cut in cuts] == [(target.rank, True, 2)] * 2


def load_of(cuts):
    return Counter(cut.source for cut in cuts)


def test_a_latent_cache_is_stored_once_and_each_rank_writes_its_share_of_the_layers():
    layers = tuple(range(8))
    cuts = cuts_to(Shard(0, 0, 1, layers), shards_of(1, layers, 4))
    assert load_of(cuts) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert sorted(cut.layer for cut in cuts) == list(layers)


def test_a_latent_cache_that_is_loaded_gives_a_replica_to_every_rank():
    layers = tuple(range(8))
    for target in shards_of(1, layers, 4):
        assert load_of(cuts_to(target, [Shard(0, 0, 1, layers)])) == {0: 8}


def test_replicas_share_the_load_in_each_layer_and_over_all_layers():
    """Layers of one group are often every fourth of the model: turns go by place, not by number."""
    layers = tuple(range(3, 32, 4))
    sources = shards_of(1, layers, 4)
    cuts = [cut for target in shards_of(1, layers, 8) for cut in cuts_to(target, sources)]
    assert load_of(cuts) == dict.fromkeys(range(4), 16)
    for layer in layers:
        assert load_of(cut for cut in cuts if cut.layer == layer) == dict.fromkeys(range(4), 2)
    gqa = [cut for target in shards_of(2, layers, 4) for cut in cuts_to(target, shards_of(2, layers, 8))]
    assert set(load_of(gqa).values()) == {4}


def test_the_ranks_of_a_lost_stage_are_missed_by_layer():
    layers = tuple(range(48))
    sources = [shard for shard in shards_of(4, layers, 2, 2) if shard.rank < 2]
    with pytest.raises(LayoutMismatch, match=r"no source holds layers \[24, 25.*47\]"):
        cuts_to(shards_of(4, layers, 1)[0], sources)


def test_a_lost_head_is_missed_by_name():
    with pytest.raises(LayoutMismatch, match="no source holds head 2 of layer 0"):
        cuts_to(shards_of(4, (0,), 1)[0], shards_of(4, (0,), 2)[:1])


def test_an_opaque_plane_moves_between_equal_shards_only():
    """A plane without a head axis that is not the same on every rank can't be cut."""
    opaque = [(PlaneKind.STATE, False)]
    sources = shards_of(4, (0,), 2)
    (cut,) = cuts_to(sources[1], sources)
    group = filled(sources[1], opaque, HEAD_FIRST)[1]
    assert len(route_of([cut], group, group).plan([0], [1]).layer(0)) == 1
    cuts = cuts_to(shards_of(4, (0,), 1)[0], sources)
    with pytest.raises(WholeBlocksOnly, match=r"0\.0: has no head axis"):
        route_of(cuts, group, group)


def test_sides_with_other_planes_or_without_the_layer_are_refused():
    shard = Shard(0, 0, 2, (0,))
    kv, split = (filled(shard, FAMILIES[name], HEAD_FIRST)[1] for name in ("kv", "k+v+indexer"))
    cuts = cuts_to(shard, [shard])
    with pytest.raises(LayoutMismatch, match="layer 0: the two sides hold different planes"):
        route_of(cuts, kv, split)
    other = filled(Shard(0, 0, 2, (7,)), FAMILIES["kv"], HEAD_FIRST)[1]
    with pytest.raises(LayoutMismatch, match="layer 0"):
        route_of(cuts, other, kv)
