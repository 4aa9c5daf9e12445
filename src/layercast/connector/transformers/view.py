"""Where one forward writes and reads rows, as index tensors shared by all layers of a group.

A batch is ragged: requests have different lengths, so rows are placed such that all requests end at the same column,
and the columns before a request's first token are masked. Does not know layers, steps or the scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layercast.connector.transformers.space import BlockTables, Table, first_visible
from layercast.errors import BadBlocks
from layercast.spec.groups import GroupKind, GroupSpec


@dataclass(frozen=True, slots=True)
class GroupView:
    """One attention group's indices for a batch of B requests with T new tokens each.

    write_block, write_offset: int64 `[B, T]`. read_blocks: int64 `[B * blocks]`, block tables padded on the left.
    read_rows: int64 `[B * columns]` into the rows of those blocks, or None where they are the `columns` rows from
    `first_row` (a batch of one). The columns are positions `[offset, offset + columns)` of the longest request.
    """

    write_block: torch.Tensor
    write_offset: torch.Tensor
    read_blocks: torch.Tensor
    read_rows: torch.Tensor | None
    first_row: int
    columns: int
    offset: int


@dataclass(frozen=True, slots=True)
class ForwardView:
    """One forward: `past` tokens cached before it for each request, `new` tokens for every request.

    groups: a view for each group (None for the recurrent one). states: int64 `[B]`, running state blocks.
    """

    past: tuple[int, ...]
    new: int
    groups: tuple[GroupView | None, ...]
    states: tuple[int, ...]
    device: torch.device

    @property
    def longest(self) -> int:
        """Tokens of the longest request before this forward."""
        return max(self.past)

    def position_ids(self) -> torch.Tensor:
        """int64 `[B, T]`; always given to the model, since some restart at 0 otherwise."""
        return (torch.tensor(self.past)[:, None] + torch.arange(self.new)).to(self.device)

    def attention_mask(self) -> torch.Tensor | None:
        """int64 `[B, columns]` with 0 before a request's first token; None where no column is masked."""
        if len(set(self.past)) == 1:
            return None
        pad = self.longest - torch.tensor(self.past)
        return (torch.arange(self.longest + self.new)[None] >= pad[:, None]).long().to(self.device)


def forward_view(
    specs: Sequence[GroupSpec], tables: Sequence[BlockTables], past: Sequence[int], new: int, device: torch.device
) -> ForwardView:
    """The view of a forward. Raises BadBlocks when a row that will be read or written has no block."""
    groups = tuple(
        None
        if spec.kind is GroupKind.RECURRENT
        else _group(spec, [table.groups[index] for table in tables], past, new, device)
        for index, spec in enumerate(specs)
    )
    states = tuple(table.state for table in tables if table.state is not None)
    return ForwardView(tuple(past), new, groups, states, device)


def _group(spec: GroupSpec, tables: Sequence[Table], past: Sequence[int], new: int, device: torch.device) -> GroupView:
    size, longest = spec.block_size, max(past)
    offset = first_visible(spec, longest)
    columns = longest + new - offset
    used = [
        _blocks(spec, table, first_visible(spec, done), done + new) for table, done in zip(tables, past, strict=True)
    ]
    width = max(len(blocks) for blocks in used)
    read = torch.tensor([[0] * (width - len(blocks)) + blocks for blocks in used])
    done = torch.tensor(past)[:, None]
    write = done + torch.arange(new)
    # Column 0 of a request's padded table is this position (negative where the table was padded).
    origin = torch.tensor([-(-(p + new) // size) - width for p in past])[:, None] * size
    block = read.gather(1, torch.div(write - origin, size, rounding_mode="floor"))
    rows: torch.Tensor | None = None
    if len(past) > 1:
        lowest = torch.tensor([first_visible(spec, p) for p in past])[:, None]
        # A masked column reads the request's first visible row: any finite value will do.
        position = (torch.arange(offset, offset + columns) - (longest - done)).clamp(min=lowest)
        rows = position - origin + torch.arange(len(past))[:, None] * (width * size)
    return GroupView(
        write_block=block.to(device),
        write_offset=(write % size).to(device),
        read_blocks=read.flatten().to(device),
        read_rows=None if rows is None else rows.flatten().to(device),
        first_row=offset - int(origin[0]),
        columns=columns,
        offset=offset,
    )


def _blocks(spec: GroupSpec, table: Table, first: int, end: int) -> list[int]:
    """The blocks of rows [first, end)."""
    blocks = table[first // spec.block_size : -(-end // spec.block_size)]
    held = [block for block in blocks if block is not None]
    if len(held) != -(-end // spec.block_size) - first // spec.block_size:
        raise BadBlocks(f"group {spec.name!r}: rows {first}..{end - 1} need blocks that the table {table} lacks")
    return held
