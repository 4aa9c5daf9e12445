import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_engines import assert_every_reference_owned

from layercast.connector.transformers.allocator import BlockAllocator
from layercast.connector.transformers.space import BlockSpace, first_visible
from layercast.errors import BadTransition, Refused
from layercast.flow.orders import BlockPairs
from layercast.spec.groups import GroupKind, GroupSpec

SPECS = [
    GroupSpec("full", GroupKind.FULL, 4, (0,)),
    GroupSpec("window", GroupKind.WINDOW, 4, (1,), 6),
    GroupSpec("recurrent", GroupKind.RECURRENT, 8, (2,)),
]
COUNTS = (12, 9, 4)


def space_of(freed=None):
    freed = [] if freed is None else freed
    return BlockSpace(SPECS, [BlockAllocator(1, n) for n in COUNTS], lambda group, ids: freed.append((group, *ids)))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "trim", "free", "snapshot", "snapshot", "drop", "hold", "end"]),
        st.integers(0, 1),
        st.integers(1, 9),
    ),
    min_size=10,
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_every_reference_belongs_to_a_table_or_a_copy_whatever_happens(actions):
    """Requests grow, trim, snapshot and end while copies of their blocks begin and end in any order."""
    space = space_of()
    live = [(space.tables(), [0]) for _ in range(2)]
    orders = []
    for number, (action, who, amount) in enumerate(actions):
        tables, done = live[who]
        if action == "grow" and space.grow(tables, done[0], done[0] + amount):
            done[0] += amount
        elif action == "trim":
            space.trim(tables, done[0])
        elif action == "free":
            space.free(tables)
            done[0] = 0
        elif action == "snapshot" and done[0] >= 8:
            space.take_snapshot(tables, done[0])
        elif action == "drop" and done[0] >= 8:
            space.drop_snapshot(tables, done[0])
        elif action == "hold":
            named = [tuple(block for block in table if block is not None) for table in tables.groups]
            space.hold(f"order-{number}", [BlockPairs(group, (), blocks) for group, blocks in enumerate(named)])
            orders.append(f"order-{number}")
        elif action == "end" and orders:
            space.ended(orders.pop(amount % len(orders)))
        assert_every_reference_owned(space, [tables for tables, _ in live])
        for index, spec in enumerate(SPECS[:2]):
            first = first_visible(spec, done[0]) // spec.block_size
            held = tables.groups[index][first : -(-done[0] // spec.block_size)]
            assert len(held) == max(0, -(-done[0] // spec.block_size) - first)
            assert None not in held
    for tables, _ in live:
        space.free(tables)
    for order in orders:
        space.ended(order)
    assert [allocator.free for allocator in space.allocators] == list(COUNTS)


def test_growth_takes_all_groups_or_none():
    space = space_of()
    assert space.grow(space.tables(), 0, 36)
    before = [allocator.free for allocator in space.allocators]
    assert not space.grow(space.tables(), 0, 16)
    assert [allocator.free for allocator in space.allocators] == before


def test_a_block_under_a_copy_is_free_only_after_the_copy_and_its_owner_are_gone():
    freed = []
    space = space_of(freed)
    tables = space.tables()
    space.grow(tables, 0, 4)
    block = tables.groups[0][0]
    space.hold("save", [BlockPairs(0, (), (block,))])
    space.free(tables)
    assert (0, block) not in freed
    space.ended("save")
    assert (0, block) in freed
    space.ended("save")
    assert freed.count((0, block)) == 1


def test_an_order_id_is_used_once():
    space = space_of()
    space.hold("save", [])
    with pytest.raises(BadTransition, match="'save'"):
        space.hold("save", [])


def test_only_sequences_that_fit_alone_are_accepted():
    space_of().refuse_if_too_long(48, 8)
    with pytest.raises(Refused, match=r"49 tokens.*13 blocks.*'full'.*has 12"):
        space_of().refuse_if_too_long(49, 8)
