from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from layercast.errors import Refused
from layercast.plan.prefix import Usable, lengthening, usable_prefix, window_blocks
from layercast.spec.groups import GroupKind, GroupSpec


def group(kind: str, size: int, window: int | None = None) -> GroupSpec:
    return GroupSpec(f"{kind}{size}", GroupKind(kind), size, (0,), window)


@st.composite
def groups_and_presence(draw):
    specs, present = [], []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(list(GroupKind)))
        size = draw(st.sampled_from([1, 2, 3, 4, 8]))
        specs.append(group(kind, size, draw(st.integers(1, 12)) if kind is GroupKind.WINDOW else None))
        likely = st.sampled_from([True, True, True, False])
        present.append(draw(st.lists(likely, max_size=48 // size)))
    step = draw(st.sampled_from([1, 4, 8]))
    return specs, present, draw(st.integers(0, 50)), step * draw(st.integers(0, 3))


def dependencies(spec: GroupSpec, boundary: int) -> set[int]:
    """Blocks that a query at `boundary` depends on, from the words of the contract."""
    blocks = boundary // spec.block_size
    if spec.kind is GroupKind.RECURRENT:
        return {blocks - 1}
    if spec.kind is GroupKind.WINDOW:
        tail = ceil((spec.window + spec.block_size - 1) / spec.block_size)
        return set(range(blocks)[-tail:])
    return set(range(blocks))


@settings(max_examples=400)
@given(groups_and_presence())
@example(([group("full", 4)], [[True] * 4], 16, 0))
def test_the_usable_prefix_is_the_longest_that_every_group_can_serve(case):
    specs, present, prompt, local = case
    most = max(0, prompt - 1)
    best, needed = min(local, most), tuple(() for _ in specs)
    for boundary in range(local + 1, most + 1):
        wants = []
        for spec, has in zip(specs, present, strict=True):
            want = {index for index in dependencies(spec, boundary) if index >= local // spec.block_size}
            if boundary % spec.block_size or any(index >= len(has) or not has[index] for index in want):
                break
            wants.append(tuple(sorted(want)))
        else:
            best, needed = boundary, tuple(wants)
    usable = usable_prefix(specs, present, prompt, local)
    assert (usable.tokens, tuple(map(tuple, usable.needed))) == (best, needed)


def test_a_full_hit_leaves_the_last_block_to_compute():
    full = [group("full", 16)]
    assert usable_prefix(full, [[True] * 4], 64).tokens == 48
    assert usable_prefix(full, [[True] * 4], 65).tokens == 64


@pytest.mark.parametrize("tokens", [0, 1, 15, 16])
def test_a_prompt_of_at_most_a_block_has_no_reusable_prefix(tokens):
    assert usable_prefix([group("full", 16)], [[True] * 4], tokens) == Usable(0, (range(0),))


def test_a_window_group_is_asked_for_its_tail_only():
    """Block 32, window 4096: 129 blocks at most, also where the prompt is 98,012 tokens."""
    assert window_blocks(4096, 32) == 129
    blocks = 98_012 // 32
    tail_only = [index >= blocks - 129 for index in range(blocks)]
    usable = usable_prefix([group("full", 32), group("window", 32, 4096)], [[True] * blocks, tail_only], 98_012)
    assert usable.tokens == blocks * 32
    assert usable.needed[1] == range(blocks - 129, blocks)


def test_a_gap_in_one_group_moves_the_boundary_to_one_that_is_valid_in_both():
    small, large = [True, True, True, False, True, True, True, True], [True, True]
    assert usable_prefix([group("full", 16), group("full", 64)], [small, large], 129).tokens == 0
    small[3] = True
    assert usable_prefix([group("full", 16), group("full", 64)], [small, large], 129).tokens == 128


def test_a_recurrent_group_needs_the_one_snapshot_at_the_boundary():
    specs = [group("full", 16), group("recurrent", 64)]
    usable = usable_prefix(specs, [[True] * 12, [False, True, False]], 193)
    assert usable == Usable(128, (range(8), range(1, 2)))


def test_local_blocks_are_not_brought_in_again():
    specs = [group("full", 16), group("window", 16, 33), group("recurrent", 32)]
    present = [[False] * 4 + [True] * 4, [False] * 5 + [True] * 3, [False, False, False, True]]
    assert usable_prefix(specs, present, 200, local_tokens=64) == Usable(128, (range(4, 8), range(5, 8), range(3, 4)))
    assert usable_prefix(specs, [[], [], []], 200, local_tokens=64) == Usable(64, (range(0),) * 3)


def test_groups_without_presence_or_window_are_refused():
    with pytest.raises(Refused, match="1 groups, but presence of 2"):
        usable_prefix([group("full", 16)], [[], []], 10)
    with pytest.raises(Refused, match="how many tokens its window has"):
        usable_prefix([group("window", 4)], [[True] * 4], 10)


@settings(max_examples=300)
@given(groups_and_presence(), st.randoms(use_true_random=False), st.integers(0, 20))
def test_what_lengthens_a_prefix_is_there_not_here_and_is_all_that_it_takes(case, draw, least):
    specs, there, tokens, _ = case
    here = [[has and draw.random() < 0.5 for has in group] for group in there]
    wanted = lengthening(specs, here, there, tokens, least)
    before = usable_prefix(specs, here, tokens).tokens
    most = usable_prefix(specs, there, tokens).tokens
    for has, below, indices in zip(here, there, wanted, strict=True):
        assert all(below[i] and not has[i] for i in indices)
    after = [
        [has or index in indices for index, has in enumerate(group)]
        for group, indices in zip(here, wanted, strict=True)
    ]
    if most - before >= max(1, least):
        assert usable_prefix(specs, after, tokens).tokens == most
    else:
        assert not any(wanted)
