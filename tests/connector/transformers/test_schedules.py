"""Random schedules: requests come, go and are pushed out while bytes rot, keys vanish and copies fail or stall.

Whatever happens, every answer is the one of plain transformers, everything ends, and nothing is left behind.
"""

import random
import sys
import threading
import time

import pytest
from erratic import ErraticMover
from small_engines import assert_no_block_lost, bare_engine, pooled_engine, prompt_of

from layercast.connector.transformers.requests import Params
from layercast.flow.orders import LoadEnd, LoadOutcome

FAMILIES = ["llama", "gemma3", "granite4", "deepseek_v3"]
TOKENS = 12
LENGTHS = (1, 15, 16, 17, 33, 48, 64, 65, 97)
DEADLINE_S = 60.0
EVENTS, WEIGHTS = ("submit", "abort", "flip", "forget", "stall", "nothing"), (40, 2, 4, 2, 4, 48)


@pytest.fixture
def impatient():
    """Threads change places as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Schedule:
    """One engine and the dice that decide what happens to it."""

    def __init__(self, seed, family, stock):
        self.dice, self.family, self.stock = random.Random(seed), family, stock
        self.verify = self.dice.random() < 0.6
        """Where bytes are not checked none may rot; then nothing but right moves keeps an answer right."""
        self.asked, self.movers, self.answers, self.preemptions, self.failed, self.loaded = {}, [], 0, 0, 0, 0

    def mover(self):
        pick = self.dice.choice
        self.movers.append(
            ErraticMover(
                self.dice.random(), fail=pick([0, 0, 0.02, 0.1]), nap=pick([0, 0.1]), nap_s=0.01, reorder=pick([0, 1])
            )
        )
        return self.movers[-1]

    def config(self):
        pick = self.dice.choice
        return {
            "host_bytes": pick([80_000, 300_000, 16 << 20]),
            "use_layerwise": pick([True, True, False]),
            "layerwise_window": pick([1, 2, 3]),
            "layerwise_prefetch_layers": pick([1, 2, 4]),
            "layer_wait_ms": pick([5, 5000]),
            "lease_s": pick([0.001, 60.0, 60.0]),
            "verify": self.verify,
        }

    def settings(self):
        pick = self.dice.choice
        size = pick([1, 4, 16])
        chunk = pick([1, 3, 8]) * 16 // size
        return {
            "block_size": size,
            "state_block": 16,
            # Enough for the longest sequence alone; often not for two.
            "blocks": -(-(max(LENGTHS) + TOKENS) // size) + pick([0, 0, 2, 64]),
            "chunk_blocks": chunk,
            "max_batch": pick([1, 3, 4]),
            "block_major": pick([True, False]),
        }

    def prompt(self):
        """A prefix of one of two sequences, perhaps with a tail, or the second turn of a chat."""
        base = prompt_of(97, seed=self.dice.choice([1, 2]))[: self.dice.choice(LENGTHS)]
        turn = self.dice.random()
        if turn < 0.2 and len(base) <= 65:
            return tuple(base) + self.stock(self.family, tuple(base), TOKENS)[0][:8] + tuple(prompt_of(9, seed=3))
        return tuple(base) if turn < 0.7 or len(base) > 65 else tuple(base + prompt_of(20, seed=4))

    def run(self, engine, requests):
        deadline = time.monotonic() + DEADLINE_S
        while requests or self.asked:
            assert time.monotonic() < deadline, f"{len(self.asked)} requests have not ended in {DEADLINE_S} s"
            (event,) = self.dice.choices(EVENTS, WEIGHTS)
            if requests and (event == "submit" or not self.asked):
                requests -= 1
                prompt, tokens = self.prompt(), self.dice.randint(1, TOKENS)
                self.asked[engine.submit(prompt, Params(max_tokens=tokens))] = (prompt, tokens)
            elif event == "abort":
                request = self.dice.choice(list(self.asked))
                self.check(request, engine.abort(request), aborted=True)
            elif event == "flip" and self.verify:
                self.flip(engine)
            elif event == "forget":
                self.forget(engine)
            elif event == "stall":
                self.movers[0].stall(self.dice.choice([0.002, 0.03]))
            for output in engine.step():
                if output.result:
                    self.check(output.request, output.result)
            assert_no_block_lost(engine)
            engine.pool.directory.check()

    def check(self, request, result, aborted=False):
        prompt, tokens = self.asked.pop(request)
        right = self.stock(self.family, prompt, TOKENS)[0][:tokens]
        assert result.tokens == (right[: len(result.tokens)] if aborted else right)
        self.answers += not aborted
        self.preemptions += result.preemptions
        self.failed += sum(isinstance(end, LoadOutcome) and end.end is not LoadEnd.LANDED for end in result.receipts)
        self.loaded += result.loaded_tokens > 0
        if not aborted:
            assert result.computed_tokens + result.loaded_tokens == len(prompt)

    def flip(self, engine):
        """Change some bytes of a block: where it is stored, or where it is just being saved or loaded."""
        slab = engine.pool.worker.ways.slab
        group = self.dice.randrange(len(slab.slots))
        shelf = engine.pool.directory._shelves[group]
        slots = [*shelf.stored.values(), *shelf.saving.values()]
        if slots:
            slot, layer = self.dice.choice(slots), self.dice.choice(slab.layout.groups[group].layers)
            data = bytearray(slab.read(group, slot, layer))
            for _ in range(self.dice.choice([1, 100])):
                data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
            slab.write(group, slot, layer, bytes(data))

    def forget(self, engine):
        group = self.dice.randrange(len(engine.memory.specs))
        stored = list(engine.pool.directory._shelves[group].stored)
        if stored:
            engine.pool.directory.forget(group, [self.dice.choice(stored)])


def run_schedule(seed, models, stock, monkeypatch, requests):
    family = FAMILIES[seed % len(FAMILIES)]
    schedule, threads = Schedule(seed, family, stock), threading.active_count()
    monkeypatch.setattr("layercast.control.memory.CpuMover", schedule.mover)
    with pooled_engine(models(family), schedule.config(), **schedule.settings()) as engine:
        schedule.run(engine, requests)
    assert threading.active_count() == threads
    return schedule


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(16))
def test_no_schedule_gives_a_wrong_token_hangs_or_leaves_anything_behind(models, stock, monkeypatch, seed):
    run_schedule(seed, models, stock, monkeypatch, requests=6)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("family", range(len(FAMILIES)), ids=FAMILIES)
def test_no_schedule_of_many_does(models, stock, monkeypatch, family):
    schedules = [
        run_schedule(seed, models, stock, monkeypatch, requests=8)
        for seed in range(1000 + family, 1300 + family, len(FAMILIES))
    ]
    # What was meant to happen did happen: answers, preemptions, loads that failed, and loads that landed.
    assert sum(schedule.answers for schedule in schedules) > 3 * len(schedules)
    assert sum(schedule.preemptions for schedule in schedules) > 0
    assert sum(schedule.failed for schedule in schedules) > len(schedules) / 4
    assert sum(schedule.loaded for schedule in schedules) > len(schedules)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("family", ["gemma3", "granite4"])
def test_a_sampled_answer_depends_on_its_seed_alone(models, monkeypatch, family):
    """Not on the batch, nor on preemption, nor on whether its prompt was loaded, lost or computed."""
    prompts = [prompt_of(40 + 8 * (seed % 3), seed=seed % 3) for seed in range(6)]
    each = [Params(max_tokens=16, temperature=1.0, top_p=0.9, seed=seed) for seed in range(6)]
    with bare_engine(models(family)) as engine:
        alone = [engine.generate([prompt], how)[0].tokens for prompt, how in zip(prompts, each, strict=True)]
    monkeypatch.setattr("layercast.control.memory.CpuMover", lambda: ErraticMover(7, fail=0.05, nap=0.1, nap_s=0.005))
    with pooled_engine(models(family), {"layer_wait_ms": 20}, blocks=11, state_block=16, max_batch=4) as engine:
        for _ in range(2):
            results = engine.generate(prompts, each)
            assert [result.tokens for result in results] == alone
            assert sum(result.preemptions for result in results) > 0
    assert len(set(alone)) == 6
