"""What goes to the workers with which step: a few saved blocks wait for company, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from layercast.connector.vllm.due import Due
from layercast.flow.orders import BlockPairs, LoadOrder, SaveOrder

FEW = 5


def save(name, blocks):
    return SaveOrder(name, name, (BlockPairs(0, tuple(range(blocks)), tuple(range(blocks))),))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, FEW), max_size=3), st.booleans()), max_size=40),
)
def test_every_save_goes_once_in_its_order_and_waits_no_longer_than_may_be(steps):
    due, told, gone, since = Due(), [], [], {}
    for number, (patience, sizes, loads) in enumerate([*steps, (0, [], False)]):
        for size in sizes:
            told.append(name := f"save {len(told)}")
            since[name] = number
            due.saves.append(save(name, size))
        due.loads += [LoadOrder(f"load {number}", "r", 16, ())] if loads else []
        now, due = due, due.then(patience, FEW)
        went = [] if now.empty else [order.id for order in now.orders().orders.saves]
        assert [load.id for load in now.loads] == ([f"load {number}"] if loads else [])
        gone += went
        assert bool(due.saves) == (len(gone) < len(told))
        assert not due.saves or number - since[due.saves[0].id] < patience
    assert gone == told
    assert due.empty


def test_saves_that_are_worth_a_forward_of_their_own_take_along_what_waits():
    due = Due()
    due.saves.append(save("small", FEW))
    later = due.then(8, FEW)
    assert (due.saves, [order.id for order in later.saves]) == ([], ["small"])
    later.saves.append(save("large", FEW + 1))
    assert later.then(8, FEW).empty
    assert [order.id for order in later.orders().orders.saves] == ["small", "large"]


def test_steps_are_numbered_on_where_one_has_only_saves_that_wait():
    first = Due()
    first.saves.append(save("small", 1))
    second = first.then(8, FEW)
    assert first.empty
    assert second.orders().orders.step == 0
    assert second.then(0, FEW).orders().orders.step == 1
