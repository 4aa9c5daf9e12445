import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layercast.connector.transformers.space import BlockTables, first_visible
from layercast.connector.transformers.view import forward_view
from layercast.errors import BadBlocks
from layercast.spec.groups import GroupKind, GroupSpec

CPU = torch.device("cpu")


def spec_of(window, size):
    kind = GroupKind.FULL if window is None else GroupKind.WINDOW
    return GroupSpec("g", kind, size, (0,), window)


@st.composite
def batches(draw):
    size = draw(st.integers(1, 5))
    spec = spec_of(draw(st.none() | st.integers(1, 12)), size)
    past = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    new = 1 if len(past) > 1 else draw(st.integers(1, 12))
    ids = iter(draw(st.permutations(range(1, 200))))
    tables = []
    for done in past:
        first = first_visible(spec, done) // size
        blocks = [None if at < first else next(ids) for at in range(-(-(done + new) // size))]
        tables.append(BlockTables([blocks]))
    return spec, tables, past, new


@settings(max_examples=200, deadline=None)
@given(batches())
def test_rows_are_written_and_read_where_the_tables_say(batch):
    """Against brute force: every visible position of every request, in its column, from its block and offset."""
    spec, tables, past, new = batch
    view = forward_view([spec], tables, past, new, CPU)
    group, size, longest = view.groups[0], spec.block_size, max(past)
    gathered = [(block, row) for block in group.read_blocks.tolist() for row in range(size)]
    rows = group.read_rows
    order = range(group.first_row, group.first_row + group.columns) if rows is None else rows.tolist()
    mask = view.attention_mask()
    for index, (done, table) in enumerate(zip(past, tables, strict=True)):
        for step in range(new):
            block, offset = int(group.write_block[index, step]), int(group.write_offset[index, step])
            assert (block, offset) == (table.groups[0][(done + step) // size], (done + step) % size)
        lowest = first_visible(spec, done)
        for column in range(group.columns):
            position = group.offset + column - (longest - done)
            block, row = gathered[order[index * group.columns + column]]
            if position >= lowest:
                assert (block, row) == (table.groups[0][position // size], position % size)
            else:
                visible = [table.groups[0][lowest // size], lowest % size]
                assert [block, row] == visible  # finite, and masked:
                assert position < 0 or position <= done + new - 1 - spec.window
            if mask is not None:
                assert bool(mask[index, group.offset + column]) == (position >= 0)
    assert view.position_ids().tolist() == [list(range(done, done + new)) for done in past]


def test_a_row_without_a_block_is_an_error_and_never_a_zero():
    tables = BlockTables([[1, None, 3]])
    with pytest.raises(BadBlocks, match=r"rows 0\.\.5"):
        forward_view([spec_of(None, 2)], [tables], [5], 1, CPU)
