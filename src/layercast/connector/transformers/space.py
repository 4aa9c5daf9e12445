"""The block tables of requests in all groups: growing, trimming to the window, freeing, and holds of pending copies.

A block under a copy is held by a reference, so that abort, preemption, trimming and finishing are one mechanism: a
request lets go at once, and the block is free when its last copy has ended. Does not know tensors, steps or keys.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from layercast.connector.transformers.allocator import BlockAllocator
from layercast.errors import BadTransition, Refused
from layercast.flow.orders import BlockPairs
from layercast.spec.groups import GroupKind, GroupSpec

Table = list[int | None]


@dataclass(slots=True)
class BlockTables:
    """One request's blocks: for each group, the block at each block index, None where there is none.

    state: the block of the running recurrent state; entries of the recurrent group's table are snapshots.
    """

    groups: list[Table]
    state: int | None = None


@dataclass(frozen=True, slots=True)
class _Hold:
    pairs: tuple[BlockPairs, ...]
    lasting: bool


class BlockSpace:
    """Allocators of all groups and the holds of orders under way."""

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        allocators: Sequence[BlockAllocator],
        on_free: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        """on_free: is told (group, blocks) that became free; None where they may keep their old bytes."""
        self.specs = tuple(specs)
        self.allocators = tuple(allocators)
        self._on_free = on_free
        self._holds: dict[str, _Hold] = {}
        self.recurrent = next((i for i, spec in enumerate(specs) if spec.kind is GroupKind.RECURRENT), None)

    @property
    def pending(self) -> int:
        """Copies that will be reported soon, whatever a peer does."""
        return sum(not hold.lasting for hold in self._holds.values())

    @property
    def held(self) -> int:
        """Copies of any kind that have not ended."""
        return len(self._holds)

    @property
    def crowded(self) -> bool:
        """Whether copies that will be reported soon hold over a quarter of some group's blocks."""
        counts = [0] * len(self.specs)
        for hold in self._holds.values():
            for pair in () if hold.lasting else hold.pairs:
                counts[pair.group] += len(pair.blocks)
        return any(
            4 * count > allocator.count
            for index, (count, allocator) in enumerate(zip(counts, self.allocators, strict=True))
            if index != self.recurrent
        )

    def tables(self) -> BlockTables:
        """Empty tables."""
        return BlockTables([[] for _ in self.specs])

    def refuse_if_too_long(self, tokens: int, chunk: int) -> None:
        """Raises Refused when a sequence of `tokens` could not be held even alone, with both numbers."""
        for spec, allocator in zip(self.specs, self.allocators, strict=True):
            if spec.kind is GroupKind.RECURRENT:
                continue
            seen = tokens if spec.window is None else min(tokens, spec.window + chunk + spec.block_size)
            need = -(-seen // spec.block_size)
            if need > allocator.count:
                raise Refused(
                    f"{tokens} tokens (prompt and answer) need {need} blocks of group {spec.name!r}, the engine has "
                    f"{allocator.count}: shorten the prompt, lower max_tokens, or raise blocks"
                )

    def grow(self, tables: BlockTables, done: int, upto: int, needed: Sequence[Sequence[int]] = ()) -> bool:
        """Blocks for rows from the first that a query at `done` sees up to `upto`; all groups or none of them.

        needed: for each group, block indices that a load fills besides (more of a window than queries see).
        """
        wanted = [
            [] if spec.kind is GroupKind.RECURRENT else _missing(spec, table, done, upto, also)
            for spec, table, also in zip(self.specs, tables.groups, needed or ((),) * len(self.specs), strict=True)
        ]
        counts = [len(indices) for indices in wanted]
        if self.recurrent is not None and tables.state is None:
            counts[self.recurrent] = 1
        if any(count > allocator.free for count, allocator in zip(counts, self.allocators, strict=True)):
            return False
        for index, (count, allocator, table) in enumerate(zip(counts, self.allocators, tables.groups, strict=True)):
            blocks = allocator.take(count)
            if index == self.recurrent:
                tables.state = blocks[0] if blocks else tables.state
                continue
            if wanted[index]:
                table.extend([None] * (wanted[index][-1] + 1 - len(table)))
            for at, block in zip(wanted[index], blocks, strict=True):
                table[at] = block
        return True

    def trim(self, tables: BlockTables, done: int) -> None:
        """Let go of window blocks that no query at `done` or later sees."""
        for index, (spec, table) in enumerate(zip(self.specs, tables.groups, strict=True)):
            if spec.window is None:
                continue
            last = min(first_visible(spec, done) // spec.block_size, len(table))
            self._drop(index, table, range(last))

    def free(self, tables: BlockTables) -> None:
        """Let go of every block."""
        for index, table in enumerate(tables.groups):
            self._drop(index, table, range(len(table)))
            table.clear()
        if self.recurrent is not None and tables.state is not None:
            self._release(self.recurrent, [tables.state])
            tables.state = None

    def take_snapshot(self, tables: BlockTables, tokens: int) -> int | None:
        """A block for a snapshot of the state after `tokens`, put into the table; None where there is no room."""
        assert self.recurrent is not None
        self.drop_snapshot(tables, tokens)
        if not self.allocators[self.recurrent].free:
            return None
        (block,) = self.allocators[self.recurrent].take(1)
        self.set_snapshot(tables, tokens, block)
        return block

    def set_snapshot(self, tables: BlockTables, tokens: int, block: int | None) -> None:
        """Name `block` as the snapshot after `tokens`. References stay as they are."""
        assert self.recurrent is not None
        table = tables.groups[self.recurrent]
        at = tokens // self.specs[self.recurrent].block_size - 1
        table.extend([None] * (at + 1 - len(table)))
        table[at] = block

    def drop_snapshot(self, tables: BlockTables, tokens: int) -> None:
        """Let go of the snapshot after `tokens`; a copy under way still holds it."""
        assert self.recurrent is not None
        table = tables.groups[self.recurrent]
        at = tokens // self.specs[self.recurrent].block_size - 1
        self._drop(self.recurrent, table, range(at, min(at + 1, len(table))))

    def hold(self, order: str, pairs: Iterable[BlockPairs], *, lasting: bool = False) -> None:
        """Hold the engine blocks that an order names until `ended`. lasting: a peer decides how long that takes."""
        if order in self._holds:
            raise BadTransition(f"order {order!r} is under way already; an order's id is used once")
        hold = self._holds[order] = _Hold(tuple(pairs), lasting)
        for pair in hold.pairs:
            self.allocators[pair.group].hold(pair.blocks)

    def ended(self, order: str) -> None:
        """The order's copies have ended. An order that holds nothing is none of ours: nothing happens."""
        hold = self._holds.pop(order, None)
        for pair in hold.pairs if hold else ():
            self._release(pair.group, pair.blocks)

    def _drop(self, group: int, table: Table, indices: Iterable[int]) -> None:
        gone = [at for at in indices if table[at] is not None]
        self._release(group, [block for at in gone if (block := table[at]) is not None])
        for at in gone:
            table[at] = None

    def _release(self, group: int, blocks: Sequence[int]) -> None:
        freed = self.allocators[group].release(blocks)
        if freed and self._on_free is not None:
            self._on_free(group, freed)


def first_visible(spec: GroupSpec, done: int) -> int:
    """The first row that a query at position `done` sees."""
    return 0 if spec.window is None else max(0, done - spec.window + 1)


def _missing(spec: GroupSpec, table: Table, done: int, upto: int, also: Sequence[int]) -> list[int]:
    """Block indices that rows [first visible, upto) or a load need and the table lacks, ascending."""
    indices = range(first_visible(spec, done) // spec.block_size, -(-upto // spec.block_size))
    return [at for at in sorted({*indices, *also}) if at >= len(table) or table[at] is None]
