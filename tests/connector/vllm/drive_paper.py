"""vLLM's schedulers over forwards on paper: loads that fail inside them, before or after they were said to have come,
on any rank, with steps in flight, preemptions, resets and aborts, and saves whose copies end steps behind the order.

A token's KV is a digest of the KV before it and of the token; the next token is a digest of the last KV. So a byte that
was never loaded shows in what is delivered. Usage: FOLDER SCHEDULES [FIRST]; from a FIRST on they are squeezed: vLLM
finds nothing in its own cache, the slab is small, and running requests are preempted as if blocks had run out.
"""

import random
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import msgspec
from lab import BLOCK, Engine, model, prompt, tell
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from layercast.connector.vllm import saves
from layercast.connector.vllm.metadata import Reports
from layercast.connector.vllm.versions import TELLS_FAILED_REQUESTS
from layercast.flow.orders import LoadEnd, LoadOutcome, SaveOutcome, StepReport
from layercast.plan.policy import ALONE

PROMPTS, TOKENS, LIMIT = 6, 12, 3000
STOPS = list(range(5, 495, 12))
"""Tokens that end an answer, so that a request may end while another forward with it is under way."""
BLOCKS, LENGTH, CHUNK = 15, 320, 64
SQUEEZED = {"prompts": 40, "blocks": 12, "slab": 15 << 16}


def digest(before, token):
    return (before * 1_000_003 + token * 7919 + 12345) % (1 << 61)


def token_after(value):
    return 5 + value % 490


def ids_of(number):
    """Prompts that share prefixes of three lengths."""
    return [*prompt(number % 2, 70 + 40 * (number % 3)), *prompt(100 + number, 20)]


def answer_to(ids, tokens, stops=()):
    value, out = 0, []
    for token in ids:
        value = digest(value, token)
    for _ in range(tokens):
        out.append(token_after(value))
        value = digest(value, out[-1])
        if out[-1] in stops:
            break
    return out


class Rank:
    """One rank's worker: it does what all are ordered to, in its own time. faults: how often a load fails."""

    def __init__(self, number, draw, faults):
        self.number, self.draw, self.faults = number, draw, faults
        self.kv, self.slots, self.coming, self.said = {}, {}, [], {}
        """said: loads that were said to have come while they were landing, and the ends of those that have failed."""
        self.later, self.late, self.loads, self.joined = [], [], 0, 0
        """Ends that are told a step later, and loads whose failure is: it was in a layer of a draft."""
        self.saving, self.saved = [], []
        """Saves that are still to be copied, and the ends of those that were since the last report."""

    def begin(self, orders, lost):
        """Take a step's orders; what its forward reads has landed, for better or worse."""
        self.ends, self.later = self.later, []
        self.failed, self.lost = [load.request for load in self.late], set(lost)
        self.lost.update(*(load.blocks for load in self.late))
        self.late, self.come, self.come_to_nothing = [], set(), set()
        if orders is None:
            return
        for load in [load for load in (*self.coming, *self.said) if load.request in orders.aborts]:
            if load in self.coming:
                self.coming.remove(load)
                self.come.add(load.request)
            end = self.said.pop(load, None) or self._land(load, LoadEnd.ABORTED)
            self.later.append(end)
        for load in orders.loads:
            self._read(load, self._land(load))
        for load in [load for load in self.said if load.request in orders.joins]:
            self.joined += 1
            self._read(load, self.said.pop(load) or self._land(load))
        self.coming += orders.background

    def end(self, orders):
        """Copy what was to be saved some steps ago, and let what comes in the background come, or be said to."""
        ready = [save for save in self.saving if self.draw.random() < 0.5]
        self.saving = [save for save in self.saving if save not in ready] + list(orders.saves if orders else ())
        for save in ready:
            for pair in save.pairs:
                for slot, block in zip(pair.slots, pair.blocks, strict=True):
                    self.slots[slot] = [self.kv.get((block, at), 1) for at in range(BLOCK)]
            self.saved.append(SaveOutcome(save.id, save.request, True, 1, 4, 0))
        for load in [load for load, end in self.said.items() if end is None and self.draw.random() < 0.3]:
            if (end := self._land(load)).end is LoadEnd.LANDED:
                self.ends.append(end)
                del self.said[load]
            else:
                self.said[load] = end
        for load in [load for load in self.coming if self.draw.random() < 0.6]:
            self.coming.remove(load)
            self.come.add(load.request)
            if self.draw.random() < 0.7:
                self.said[load] = None
                continue
            self.ends.append(self._land(load))
            if self.ends[-1].end is not LoadEnd.LANDED:
                self.come_to_nothing.add(load.request)
                self.lost |= set() if TELLS_FAILED_REQUESTS else load.blocks

    def told(self, metadata):
        """What the worker's side of the connector says of the step."""
        orders, gone = metadata.orders, metadata.lost_requests
        saves, self.saved = self.saved, []
        told = StepReport(orders.step if orders else -1, tuple(self.failed), tuple(self.ends), tuple(saves))
        more = {"failed_recving": self.come_to_nothing | gone} if TELLS_FAILED_REQUESTS else {}
        return KVConnectorOutput(
            finished_recving=self.come | gone,
            invalid_block_ids=self.lost,
            kv_connector_worker_meta=Reports(((self.number, StepReport(-1, metadata.misled)), (self.number, told))),
            **more,
        )

    def _land(self, load, end=None):
        """Bytes come, the right ones or, of one that fails or is aborted, any."""
        self.loads += 1
        end = end or (LoadEnd.LOST if self.draw.random() < self.faults else LoadEnd.LANDED)
        for pair in load.pairs:
            for slot, block in zip(pair.slots, pair.blocks, strict=True):
                for at in range(BLOCK):
                    right = end is LoadEnd.LANDED
                    self.kv[block, at] = self.slots[slot][at] if right else self.draw.randrange(1 << 60)
        return LoadOutcome(load.id, load.request, end, 1, 4, True, 0, 0)

    def _read(self, load, end):
        """This step's forward has waited for it."""
        lately = self.later if self.draw.random() < 0.3 else self.ends
        if end.end is LoadEnd.LANDED and self.draw.random() < self.faults:
            self.late.append(load)
            end = msgspec.structs.replace(end, end=LoadEnd.LOST)
        elif end.end is not LoadEnd.LANDED:
            self.failed.append(load.request)
            self.lost |= load.blocks
            lately = self.ends
        lately.append(end)


class Forwards:
    """A model runner of several ranks. positions: whether it keeps requests' positions, as vLLM's second one does.

    beside: loads that came while a forward was under way; used: those that fill blocks which it uses; spoiled: which
    the copy of a save that is to be published still reads.
    """

    def __init__(self, draw, positions, faults, ranks):
        self.positions, self.requests = positions, {}
        self.ranks = [Rank(number, draw, faults) for number in range(ranks)]
        self.beside = self.used = self.spoiled = 0
        self.together = KVOutputAggregator(ranks)

    def run(self, output, flying, saving):
        """The step's tokens, and what the connector's workers report. flying, saving: blocks of forwards under way, and
        of saves."""
        self._take(output)
        metadata = output.kv_connector_metadata
        for load in (*metadata.orders.loads, *metadata.orders.background) if metadata.orders else ():
            self.beside += bool(flying)
            self.used += not load.blocks.isdisjoint(flying)
            self.spoiled += not load.blocks.isdisjoint(saving)
        for rank in self.ranks:
            rank.begin(metadata.orders, metadata.lost_blocks)
        sampled = [self._compute(name, tokens) for name, tokens in output.num_scheduled_tokens.items()]
        for rank in self.ranks:
            rank.end(metadata.orders)
        outputs = [made_of([], [], rank.told(metadata)) for rank in self.ranks]
        return sampled, self.together.aggregate(outputs).kv_connector_output

    def _take(self, output):
        if self.positions:
            for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
                self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            blocks = list(new.block_ids[0])
            self.requests[new.req_id] = SimpleNamespace(tokens=tokens, computed=new.num_computed_tokens, blocks=blocks)
        cached = output.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request, added = self.requests[name], list(blocks[0]) if blocks else []
            if name in cached.resumed_req_ids:
                request.tokens, request.blocks = list(cached.all_token_ids[name]), added
            else:
                request.blocks += added
            if not self.positions:
                request.computed = computed

    def _read(self, place):
        """A token's KV, if all ranks have the same of it."""
        found = {rank.kv.get(place, 0) for rank in self.ranks}
        return found.pop() if len(found) == 1 else hash(frozenset(found))

    def _compute(self, name, tokens):
        request = self.requests[name]
        for _ in range(tokens):
            self._put(request, request.tokens[request.computed])
        if request.computed < len(request.tokens):
            return []
        request.tokens.append(self._next(request))
        return [request.tokens[-1]]

    def _put(self, request, token):
        """Compute one more token."""
        at = request.computed
        before = self._read((request.blocks[(at - 1) // BLOCK], (at - 1) % BLOCK)) if at else 0
        for rank in self.ranks:
            rank.kv[request.blocks[at // BLOCK], at % BLOCK] = digest(before, token)
        request.computed += 1

    def _next(self, request):
        """The token behind the last one computed."""
        at = request.computed - 1
        return token_after(self._read((request.blocks[at // BLOCK], at % BLOCK)))


def made_of(names, sampled, reported):
    """A step's output."""
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=reported,
    )


class Paper:
    """One scheduler with up to `depth` steps in flight, over forwards on paper."""

    forwards_of = Forwards

    def __init__(self, engine, draw, kind, depth, positions, faults, ranks):
        old, config = engine.scheduler, engine.core.vllm_config
        config.scheduler_config.async_scheduling = depth > 1
        self.scheduler = kind(
            config, old.kv_cache_config, old.structured_output_manager, old.block_size, old.hash_block_size
        )
        self.scheduler.use_v2_model_runner = positions
        self.connector = self.scheduler.connector
        config.parallel_config.tensor_parallel_size = ranks
        self.connector._meet(dict.fromkeys(range(ranks), engine.hooks._handshake.facts))
        config.parallel_config.tensor_parallel_size = 1
        company = self.connector._forwards.company
        self.connector._forwards.company = lambda *rest: ALONE if draw.random() < 0.4 else company(*rest)
        self.forwards = self.forwards_of(draw, positions, faults, ranks)
        self.depth, self.flying, self.said = depth, [], {}
        self.hasher, self.preempted, self.failed = engine.core.request_block_hasher, 0, 0

    def add(self, name, ids):
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, stop_token_ids=STOPS, detokenize=False)
        self.scheduler.add_request(Request(name, ids, sampling, None, block_hasher=self.hasher))

    def squeeze(self, draw):
        """Preempt a running request now and then, mostly the newest."""
        running, chance = self.scheduler.running, draw.random()
        if 0.03 <= chance < 0.15 and running:
            victim = running.pop() if chance < 0.1 else running.pop(draw.randrange(len(running)))
            self.scheduler._preempt_request(victim, time.monotonic())
            self.scheduler.prev_step_scheduled_req_ids.discard(victim.request_id)

    def reset(self, connector):
        """Empty vLLM's cache while requests run, or fail to: what is in flight keeps its blocks. Those start again."""
        with suppress(RuntimeError):
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=connector)

    def step(self):
        output, side = self.scheduler.schedule(), self.connector.side
        waiting = (self.connector._due.saves, *(rank.saving for rank in self.forwards.ranks))
        late = {save.id: save for orders in waiting for save in orders}.values()
        saving = [pair.blocks for save in late if not side._saving[save.id].doomed for pair in save.pairs]
        flying = [blocks for *_, blocks in self.flying]
        done = self.forwards.run(output, set().union(*flying), set().union(*saving))
        used = {block for name in output.num_scheduled_tokens for block in self.forwards.requests[name].blocks}
        self.flying.append((output, *done, used))
        self.preempted += len(output.preempted_req_ids or ())
        while len(self.flying) >= self.depth:
            self.settle()

    def settle(self):
        output, sampled, reported, _ = self.flying.pop(0)
        names = list(output.num_scheduled_tokens)
        self.failed += bool(reported.invalid_block_ids)
        made = made_of(names, sampled, reported)
        for outputs in self.scheduler.update_from_output(output, made).values():
            for out in outputs.outputs:
                self.said.setdefault(out.request_id, []).extend(out.new_token_ids)


def schedule(engine, number, prompts=PROMPTS, squeezed=None):
    """One schedule: requests whose tokens differ from what they should be, and what is left.

    squeezed: draws when to preempt.
    """
    draw = random.Random(number)
    saves.COMPANY = (1, 32)[number // 2 % 2]  # 1: saves wait for others, as in a busy engine
    depth = draw.choice([1, 2, 2])
    kind, ranks, faults = AsyncScheduler if depth > 1 else Scheduler, draw.choice([1, 2]), draw.choice([0.1, 0.4])
    paper = Paper(engine, draw, kind, depth, draw.random() < 0.5, faults, ranks)
    scheduler = paper.scheduler
    to_come = [(f"{number}-{i}", draw.randrange(prompts)) for i in range(draw.randrange(8, 24))]
    asked, aborted, steps = dict(to_come), set(), 0
    while (to_come or scheduler.has_unfinished_requests()) and steps < LIMIT:
        steps += 1
        if not scheduler.has_unfinished_requests() and draw.random() < 0.5:
            scheduler.reset_prefix_cache()
        if to_come and draw.random() < (0.5 if number % 2 else 0.1):
            name, which = to_come.pop()
            paper.add(name, ids_of(which))
        if draw.random() < 0.03 and scheduler.requests:
            alive = list(scheduler.requests)
            victims = alive if draw.random() < 0.3 else [draw.choice(alive)]
            scheduler.finish_requests(victims, RequestStatus.FINISHED_ABORTED)
            aborted.update(victims)
        if draw.random() < 0.02:
            paper.reset(connector=draw.random() < 0.3)
        if squeezed is not None:
            paper.squeeze(squeezed)
        paper.step()
    while paper.flying:
        paper.settle()
    while scheduler.has_requests() and steps < LIMIT:
        steps += 1
        paper.step()
    said = {name: paper.said.get(name, []) for name in asked}
    right = {name: answer_to(ids_of(which), TOKENS, STOPS) for name, which in asked.items()}
    side, holds, f = paper.connector.side, paper.connector._holds, paper.connector._forwards
    return {
        "number": number,
        "depth": depth,
        "wrong": [n for n, out in said.items() if out != (right[n][: len(out)] if n in aborted else right[n])],
        "left": [
            side.idle,
            holds.held,
            len(paper.connector.tracked),
            *map(len, (f.coming, f.reading, f.leaving, f.failed)),
        ],
        "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "loads": paper.forwards.ranks[0].loads,
        "joined": paper.forwards.ranks[0].joined,
        "failed": paper.failed,
        "preempted": paper.preempted,
        "beside": paper.forwards.beside,
        "used": paper.forwards.used,
        "spoiled": paper.forwards.spoiled,
    }


def main(folder, count, first=""):
    engine = Engine(
        model(folder, "llama"),
        pool={"host_bytes": SQUEEZED["slab"]} if first else {},
        num_gpu_blocks_override=SQUEEZED["blocks"] if first else BLOCKS,
        max_model_len=LENGTH,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=not first,
    )
    numbers = range(int(first or 0), int(first or 0) + int(count))
    if first:
        runs = [schedule(engine, number, SQUEEZED["prompts"], random.Random(number)) for number in numbers]
    else:
        runs = [schedule(engine, number) for number in numbers]
    bad = [run for run in runs if run["wrong"] or run["left"] != [True, 0, 0, 0, 0, 0, 0]]
    facts = {"bad": bad, "runs": len(runs), "blocks": engine.blocks, "free": sorted({run["free"] for run in runs})}
    for what in ("loads", "joined", "failed", "preempted", "beside", "used", "spoiled"):
        facts[what] = sum(run[what] for run in runs)
    facts["steps_in_flight"] = sorted({run["depth"] for run in runs})
    tell(facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
