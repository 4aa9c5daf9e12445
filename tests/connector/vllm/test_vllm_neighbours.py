"""vLLM's own block pool, whose blocks are handed out in the order in which they lie."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCKS = 48
pytest.importorskip("vllm")


def pool_of(in_order):
    from vllm.v1.core.block_pool import BlockPool

    from layercast.connector.vllm.neighbours import keep_in_order

    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
    for _ in range(in_order):
        keep_in_order(pool)
    return pool


class Prompts:
    """Prompts that take blocks and give them back, the end of a prompt first, as vLLM's own do."""

    def __init__(self, in_order):
        self.pool, self.live, self.last = pool_of(in_order), {}, {}
        """last: what each block held last, as (prompt, place)."""

    def begin(self, prompt, count):
        """What is lost of earlier prompts by it, and the blocks that it gets."""
        blocks = [block.block_id for block in self.pool.get_new_blocks(count)]
        lost = {self.last.get(block) for block in blocks}
        self.last.update({block: (prompt, place) for place, block in enumerate(blocks)})
        self.live[prompt] = blocks
        return lost, blocks

    def end(self, prompt):
        self.pool.free_blocks(self.pool.blocks[block] for block in reversed(self.live.pop(prompt)))


@settings(deadline=None)
@given(turns=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), max_size=40), repeats=st.sampled_from([1, 2]))
def test_blocks_ascend_and_the_same_ends_of_the_same_prompts_are_lost(turns, repeats):
    """Put in order once or twice."""
    plain, ours = Prompts(0), Prompts(repeats)
    for prompt, (count, ends) in enumerate(turns):
        while plain.pool.get_num_free_blocks() < count:
            oldest = next(iter(plain.live))
            plain.end(oldest)
            ours.end(oldest)
        (lost, _), (same, blocks) = plain.begin(prompt, count), ours.begin(prompt, count)
        assert same == lost
        assert all(block < behind for block, behind in pairwise(blocks))
        for some in list(plain.live)[:ends]:
            plain.end(some)
            ours.end(some)
    for prompt in list(ours.live):
        ours.end(prompt)
    assert ours.pool.get_num_free_blocks() == BLOCKS - 1, "but for the one that stands for none"


def breaks(blocks):
    """Where a copy of blocks into neighbouring slots has to begin anew."""
    return sum(behind != block + 1 for block, behind in pairwise(blocks))


def test_blocks_of_a_prompt_are_neighbours_however_often_they_have_been_handed_out():
    prompts = {in_order: Prompts(in_order) for in_order in (0, 1)}
    found = {in_order: [] for in_order in prompts}
    for number in range(40):
        for in_order, ours in prompts.items():
            found[in_order].append(breaks(ours.begin(number, 15)[1]))
            if number > 1:
                ours.end(number - 2)
    assert max(found[1]) <= 2
    assert max(found[0]) == 14, "as vLLM hands them out, each by itself"
