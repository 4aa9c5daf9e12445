"""vLLM's own block pool, whose blocks are handed out in the order in which they lie."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCKS = 48
pytest.importorskip("vllm")


def pool_of(times):
    from vllm.v1.core.block_pool import BlockPool

    from layercast.connector.vllm.neighbours import in_order

    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
    for _ in range(times):
        assert in_order(pool) is pool
    return pool


class Prompts:
    """Prompts that take blocks and give them back, the end of a prompt first, as vLLM's own do."""

    def __init__(self, times):
        """times: that its blocks are put in order."""
        self.pool, self.live, self.last = pool_of(times), {}, {}
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
    prompts = {times: Prompts(times) for times in (0, 1)}
    found = {times: [] for times in prompts}
    for number in range(40):
        for times, ours in prompts.items():
            found[times].append(breaks(ours.begin(number, 15)[1]))
            if number > 1:
                ours.end(number - 2)
    assert max(found[1]) <= 2
    assert max(found[0]) == 14, "as vLLM hands them out, each by itself"
