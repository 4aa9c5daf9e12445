import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.connector.transformers.allocator import BlockAllocator
from layercast.errors import BadBlocks


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "release"]), st.integers(0, 9)), max_size=60))
def test_a_block_is_free_exactly_when_its_last_reference_is_gone(actions):
    allocator, model = BlockAllocator(1, 8), {}
    for action, number in actions:
        if action == "take" and number <= allocator.free:
            blocks = allocator.take(number)
            assert not set(blocks) & set(model)
            assert all(1 <= block <= 8 for block in blocks)
            model.update(dict.fromkeys(blocks, 1))
        elif action == "hold" and number in model:
            allocator.hold([number])
            model[number] += 1
        elif action == "release" and number in model:
            model[number] -= 1
            gone = [number] if model[number] == 0 else []
            assert allocator.release([number]) == gone
            if gone:
                del model[number]
        assert allocator.references() == model
        assert allocator.free == 8 - len(model)


def test_lowest_blocks_go_first_so_that_they_form_runs():
    allocator = BlockAllocator(1, 6)
    assert allocator.take(5) == [1, 2, 3, 4, 5]
    allocator.release([4, 2, 3])
    assert allocator.take(3) == [2, 3, 4]


def test_more_blocks_than_are_free_are_refused_and_nothing_is_taken():
    allocator = BlockAllocator(1, 3)
    with pytest.raises(BadBlocks, match="4 blocks wanted, 3 of 3"):
        allocator.take(4)
    assert allocator.free == 3


@pytest.mark.parametrize("call", ["hold", "release"])
def test_a_block_that_nobody_holds_has_no_reference_to_add_or_end(call):
    with pytest.raises(BadBlocks, match="block 2"):
        getattr(BlockAllocator(1, 3), call)([2])
