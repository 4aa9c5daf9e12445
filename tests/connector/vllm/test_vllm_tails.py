"""When the blocks of a prompt are saved: in its step, or, a few behind a prefix that was there, with the answer."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from layercast.config import Config
from layercast.connector.vllm.saves import COMPANY, LUMP, Saves
from layercast.connector.vllm.tracked import Tracked
from layercast.control.node import scheduler_side
from layercast.control.scheduler import WorkerFacts
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.spec.keys import Identity

BLOCK, NAME = 4, "r"
SPEC = GroupSpec("full", GroupKind.FULL, BLOCK, (0,))
IDENTITY = Identity(model="m", revision="", weights_version="", dtypes=(), layout="", group="full", block_size=BLOCK)


class Run:
    """One request of an engine whose scheduler lets it compute so many tokens a step."""

    def __init__(self, prompt):
        facts = WorkerFacts((SPEC,), (IDENTITY,), (1000,), (1,))
        side = scheduler_side([facts], Config(host_bytes=1, save_decode_cache=False), False)
        tables = SimpleNamespace(of=lambda _: [list(range(1, 1000))], snapshots=lambda _: ())
        self.saves = Saves(side, tables, 1)
        self.request = SimpleNamespace(
            request_id=NAME,
            num_tokens=prompt,
            num_prompt_tokens=prompt,
            num_computed_tokens=0,
            all_token_ids=list(range(prompt)),
        )
        self.known = Tracked(self.request, {}, load=False, save=True)

    def begin(self, tokens, *, held):
        """So many tokens were there already: in the engine, or, if `held`, from the pool."""
        self.request.num_computed_tokens = tokens
        self.known.local, self.known.promised, self.known.saved = (0, tokens, tokens) if held else (tokens, 0, 0)

    def step(self, tokens, busy=False):
        """Blocks that are ordered to be saved with a step of so many tokens; 0 = an empty one."""
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=NAME)],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
            num_scheduled_tokens={NAME: tokens} if tokens else {},
        )
        orders = list(self.saves.step(output, {NAME: self.known}, busy))
        self.request.num_computed_tokens += tokens
        return [block for order in orders for pair in order.pairs for block in pair.blocks]

    def end(self):
        """Those that are left as it ends."""
        self.saves.forget(NAME)
        order = self.saves.last(self.known, [list(range(1, 1000))])
        return [] if order is None else [block for pair in order.pairs for block in pair.blocks]


@pytest.mark.parametrize("blocks", [3, LUMP, LUMP + 1])
def test_a_prompt_seen_for_the_first_time_is_saved_in_its_step(blocks):
    run = Run(blocks * BLOCK)
    assert run.step(blocks * BLOCK) == list(range(1, blocks + 1))
    assert run.end() == []


@pytest.mark.parametrize(("blocks", "few"), [(3, True), (LUMP, True), (LUMP + 1, False)])
def test_a_busy_engine_saves_short_prompts_with_their_answers(blocks, few):
    run, wanted = Run(blocks * BLOCK), list(range(1, blocks + 1))
    assert run.step(blocks * BLOCK, busy=True) == ([] if few else wanted)
    assert run.end() == (wanted if few else [])


def test_nothing_waits_for_others_where_few_run_or_where_free_blocks_are_soon_handed_out():
    saves = Run(BLOCK).saves
    assert [saves.patience(running, 10**6) for running in (0, COMPANY - 1, COMPANY, 8 * COMPANY)] == [0, 0, 1, 8]
    assert [saves.patience(8 * COMPANY, free) for free in (0, 8 * COMPANY - 1, 24 * COMPANY)] == [0, 0, 3]


@pytest.mark.parametrize("held", [True, False], ids=["in the pool", "in the engine alone"])
@pytest.mark.parametrize(("tail", "few"), [(1, True), (LUMP, True), (LUMP + 1, False)])
def test_a_few_blocks_behind_a_prefix_are_saved_with_the_answer_and_many_at_once(tail, few, held):
    prefix, run = 100, Run((100 + tail) * BLOCK)
    run.begin(prefix * BLOCK, held=held)
    wanted = list(range(1 + prefix * held, 1 + prefix + tail))
    assert run.step(tail * BLOCK) == ([] if few else wanted)
    assert run.step(0) == []
    assert run.end() == (wanted if few else [])


def test_what_is_computed_again_as_its_load_has_failed_is_saved_in_its_step():
    run = Run(103 * BLOCK)
    run.begin(100 * BLOCK, held=True)
    assert run.step(3 * BLOCK) == []
    run.request.num_computed_tokens = 98 * BLOCK  # rewound to the first block that was lost
    assert run.step(5 * BLOCK) == list(range(99, 104))
    assert run.end() == []


def test_what_was_completed_and_then_taken_away_is_not_saved():
    run = Run(103 * BLOCK)
    run.begin(100 * BLOCK, held=True)
    assert run.step(3 * BLOCK) == []
    run.request.num_computed_tokens = 0  # preempted, and its blocks are others' by now
    assert run.end() == []


@given(
    chunks=st.lists(st.integers(1, 2 * LUMP * BLOCK), min_size=1, max_size=6),
    empty=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_every_complete_block_is_saved_once_however_the_prompt_is_cut(chunks, empty):
    run, saved, done = Run(sum(chunks)), [], 0
    for chunk, gap in zip(chunks, empty, strict=False):
        saved += run.step(chunk) + (run.step(0) if gap else [])
        done += chunk
        assert len(saved) <= done // BLOCK
    assert saved + run.end() == list(range(1, sum(chunks) // BLOCK + 1))
