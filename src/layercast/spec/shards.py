"""Which heads and layers a rank holds under tensor and pipeline parallelism.

One total rule for heads: a rank holds every KV head that its even share of the query heads reads, which is
[floor(rank * heads / size), ceil((rank + 1) * heads / size)). Where engines agree (heads divisible by size, or size by
heads) this is their rule: disjoint slices, or replicas on neighbouring ranks. Otherwise neighbours share a head.
A latent (MLA) cache is one head, so every rank holds a replica.
Does not know addresses or strides.
"""

from collections.abc import Sequence

import msgspec

from layercast.errors import Refused


class Shard(msgspec.Struct, frozen=True):
    """What one rank holds: `heads` consecutive KV heads from `first_head` of each of its `layers`, in model numbers."""

    rank: int
    first_head: int
    heads: int
    layers: tuple[int, ...]

    @property
    def last_head(self) -> int:
        """One past the last head it holds."""
        return self.first_head + self.heads

    def holds(self, layer: int, head: int) -> bool:
        """Whether that head of that layer is here."""
        return layer in self.layers and self.first_head <= head < self.last_head


def heads_of(total_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """KV heads that a tensor-parallel rank holds. Raises Refused for a rank or a number that can't be."""
    _check("tp", tp_size, tp_rank)
    if total_kv_heads < 1:
        raise Refused(f"{total_kv_heads} KV heads: a latent cache counts as one head")
    return range(tp_rank * total_kv_heads // tp_size, -(-(tp_rank + 1) * total_kv_heads // tp_size))


def layers_of(layers: Sequence[int], pp_size: int, pp_rank: int) -> tuple[int, ...]:
    """Layers of an even pipeline split. What an engine really registered on a rank takes precedence over this."""
    _check("pp", pp_size, pp_rank)
    if len(layers) < pp_size:
        raise Refused(f"{len(layers)} layers can't be spread over {pp_size} pipeline ranks")
    return tuple(layers[pp_rank * len(layers) // pp_size : (pp_rank + 1) * len(layers) // pp_size])


def shards_of(total_kv_heads: int, layers: Sequence[int], tp_size: int, pp_size: int = 1) -> tuple[Shard, ...]:
    """The shards of all ranks, tensor-parallel ranks of a pipeline stage next to each other."""
    shards = []
    for pp_rank in range(pp_size):
        stage = layers_of(layers, pp_size, pp_rank)
        for tp_rank in range(tp_size):
            held = heads_of(total_kv_heads, tp_size, tp_rank)
            shards.append(Shard(pp_rank * tp_size + tp_rank, held.start, len(held), stage))
    return tuple(shards)


def _check(name: str, size: int, rank: int) -> None:
    if not 0 <= rank < size:
        raise Refused(f"{name} rank {rank} of {size} does not exist")
