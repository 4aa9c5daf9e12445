"""vLLM's schedulers over forwards on paper that verify drafts: what is saved, when its copy ends some steps later.

As in `drive_paper.py` a token's KV is a digest of all before it, so it is known what each block of the pool is to hold.
Usage: FOLDER SCHEDULES [calm]; calm: no load fails, nobody is aborted, and there is room for all.
"""

import random
import sys

from drive_paper import BLOCK, CHUNK, LENGTH, LIMIT, Forwards, Paper, answer_to, digest, token_after
from lab import Engine, model, prompt, tell
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from layercast.connector.vllm import saves

DRAFTS, RIGHT = 3, 0.6
"""Most drafts of a request in a step, and how often one is right."""
LENGTHS, ANSWERS = (5, 31, 32, 33, 64, 90, 130, 170), (1, 1, 2, 12, 40, 70)
WISHES = (None, None, None, None, {"save": False}, {"load": False}, {"salt": "x"})


class Drafting(Forwards):
    """A runner that makes drafts, of which some are wrong, and verifies them in the next step."""

    def __init__(self, draw, positions, faults, ranks):
        super().__init__(draw, positions, faults, ranks)
        self.draw, self.verified = draw, [0, 0]

    def run(self, output, *under_way):
        self.drafts = output.scheduled_spec_decode_tokens
        return super().run(output, *under_way)

    def _compute(self, name, tokens):
        if not (drafts := self.drafts.get(name)):
            return super()._compute(name, tokens)
        request = self.requests[name]
        while request.computed < len(request.tokens):
            self._put(request, request.tokens[request.computed])
        said, right = [self._next(request)], True
        for draft in drafts:  # -1: not known to the scheduler
            guessed = (said[-1] if self.draw.random() < RIGHT else 7) if draft == -1 else draft
            self._put(request, guessed)
            right = right and guessed == said[-1]
            self.verified[right] += 1
            if right:
                said.append(self._next(request))
        request.tokens += said
        request.computed = len(request.tokens) - 1
        return said

    def drafted(self, names):
        """Drafts of those of the requests that it has, for a scheduler that is told of them."""
        names, drafts = [name for name in names if name in self.requests], []
        for name in names:
            request, row = self.requests[name], []
            at = len(request.tokens) - 2
            value, token = self._read((request.blocks[at // BLOCK], at % BLOCK)), request.tokens[-1]
            for _ in range(self.draw.randrange(DRAFTS + 1)):
                value = digest(value, token)
                token = token_after(value) if self.draw.random() < RIGHT else 7
                row.append(token)
            drafts.append(row)
        return DraftTokenIds(names, drafts)


class Drafts(Paper):
    """A scheduler of such forwards. One with steps in flight leaves the drafts to them."""

    forwards_of = Drafting

    def add(self, name, ids, tokens, wishes):
        extra = None if wishes is None else {"kv_transfer_params": {"layercast": wishes}}
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        self.scheduler.add_request(Request(name, ids, sampling, None, block_hasher=self.hasher))

    def settle(self):
        output, sampled, *_ = self.flying[0]
        super().settle()
        if self.depth == 1:
            spoke = [name for name, tokens in zip(output.num_scheduled_tokens, sampled, strict=True) if tokens]
            self.scheduler.update_draft_token_ids(self.forwards.drafted(spoke))


def requests_of(number, draw):
    """(name, prompt, tokens of its answer, wishes): some begin alike, some go on where another has ended."""
    asked = []
    for nth in range(draw.randrange(8, 24)):
        which = draw.randrange(16)
        ids = [*prompt(which % 2, LENGTHS[which % 8]), *prompt(100 + which, (0, 1, 20, 40)[which % 4])]
        if draw.random() < 0.3:
            ids += [*answer_to(ids, draw.choice((3, 30))), *prompt(500 + which, draw.choice((1, 20)))]
        asked.append((f"{number}-{nth}", ids[:240], draw.choice(ANSWERS), draw.choice(WISHES)))
    return asked


def blocks_of(side, ids):
    """(key, what the block is to hold) of the full blocks of tokens."""
    (chain,) = side._names.of(None, ids, len(ids))
    values = [0]
    for token in ids:
        values.append(digest(values[-1], token))
    return [(key, values[1 + at * BLOCK : 1 + (at + 1) * BLOCK]) for at, key in enumerate(chain)]


def schedule(engine, number, calm):
    """One schedule: what was said or saved that is wrong, what was not saved, and what is left."""
    draw = random.Random(number)
    saves.LUMP, depth = draw.choice([2, 3, 64]), draw.choice([1, 2])
    kind, faults = AsyncScheduler if depth > 1 else Scheduler, 0 if calm else draw.choice([0.1, 0.4])
    paper = Drafts(engine, draw, kind, depth, depth > 1, faults, draw.choice([1, 2]))
    scheduler, connector, side = paper.scheduler, paper.connector, paper.connector.side
    asked, aborted, steps = requests_of(number, draw), set(), 0
    to_come = list(asked)
    while (to_come or scheduler.has_requests() or paper.flying) and steps < LIMIT:
        steps += 1
        if to_come and draw.random() < (0.5 if number % 2 else 0.1):
            paper.add(*to_come.pop())
        if not scheduler.has_unfinished_requests() and draw.random() < 0.3:
            scheduler.reset_prefix_cache()
        if not calm and draw.random() < 0.03 and scheduler.requests:
            victim = draw.choice(list(scheduler.requests))
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
            aborted.add(victim)
        paper.step()
        if not (to_come or scheduler.has_requests()):
            while paper.flying:
                paper.settle()
    right = {name: answer_to(ids, tokens) for name, ids, tokens, _ in asked}
    said = {name: paper.said.get(name, []) for name in right}
    stored = side.directory._shelves[0].stored
    known = {key: values for name, ids, *_ in asked for key, values in blocks_of(side, [*ids, *right[name]])}
    found = [(slot, known[key]) for key, slot in stored.items() if key in known]
    owed = {
        key
        for name, ids, _, wishes in asked
        if wishes in (None, {"load": False})
        for key, _ in blocks_of(side, [*ids, *right[name]][:-1])  # the last token's KV is not computed
    }
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return {
        "number": number,
        "wrong": [n for n, out in said.items() if out != (right[n][: len(out)] if n in aborted else right[n])],
        "blocks": [slot for slot, values in found for rank in paper.forwards.ranks if rank.slots[slot] != values],
        "missing": len(owed - stored.keys()) if calm else 0,
        "left": [side.idle, connector._holds.held, len(connector.tracked), engine.blocks - free],
        "checked": len(found),
        "loads": paper.forwards.ranks[0].loads,
        "verified": paper.forwards.verified,
    }


def main(folder, count, calm=""):
    speculative = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    engine = Engine(
        model(folder, "llama"),
        num_gpu_blocks_override=60 if calm else 15,
        max_model_len=LENGTH,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=True,
        speculative_config=speculative,
    )
    runs = [schedule(engine, number, bool(calm)) for number in range(int(count))]
    bad = [run for run in runs if run["wrong"] or run["blocks"] or run["missing"] or run["left"] != [True, 0, 0, 0]]
    facts = {"bad": bad, "runs": len(runs)} | {what: sum(run[what] for run in runs) for what in ("checked", "loads")}
    facts["rejected"], facts["accepted"] = map(sum, zip(*(run["verified"] for run in runs), strict=True))
    tell(facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
