"""Hits beside running requests: how they are loaded, by the policy; faults in such loads. Usage: FOLDER FAULTS."""

import logging
import queue
import random
import sys

from drive_faults import Log, Troubles
from lab import BLOCK, Engine, model, prompt, tell
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from layercast.link import Link
from layercast.observe.receipts import receipts_in
from layercast.plan.policy import Estimate

HIT, REST = 6 * BLOCK, 70
GBPS, WAIT_MS, SOON_S = 0.4, 300, 10
TALK = prompt(99, 20)
KEEP = {"extra_args": {"kv_transfer_params": {"layercast": {"save": False}}}}
"""What is stored of a prompt are its first HIT tokens, whoever has answered it."""


class Known:
    """Costs that do not depend on this machine: a load that does not hide whole, but in its last layers."""

    estimate = Estimate(link_bytes_per_s=GBPS * 1e9 / 8, token_s=5.14e-5, forward_s=2e-3)

    def loaded(self, nbytes, seconds):
        """Nothing new."""

    def computed(self, tokens, seconds):
        """Nothing new."""


class Passing:
    """Counts the layers that a forward has passed without asking for loads that it was to wait for."""

    def __init__(self, worker):
        self.count, self._worker, self._pass_on = 0, worker, worker.wait_for_layer_load
        worker.wait_for_layer_load = self

    def __call__(self, name):
        orders = self._worker._connector_metadata.orders
        self.count += orders is not None and bool(orders.joins or orders.loads) and self._worker._step is None
        self._pass_on(name)


def beside(engine, number, *prompts, others=True, keep_local=False, apart=0):
    """Prompts that arrive, `apart` steps one after another, while another request runs; and what it took."""
    assert keep_local or engine.llm.reset_prefix_cache()
    llm, done = engine.llm.llm_engine, {}
    sampling = {
        n: SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, **KEEP) for n in (8, 60)
    }

    def step():
        done.update((reply.request_id, reply) for reply in llm.step() if reply.finished)

    first = len(engine.orders)
    if others:
        llm.add_request(f"talk-{number}", {"prompt_token_ids": TALK}, sampling[60])
        for _ in range(3):
            step()
    for at, ids in enumerate(prompts):
        llm.add_request(f"hit-{number}-{at}", {"prompt_token_ids": ids}, sampling[8])
        for _ in range(apart):
            step()
    steps = 0
    while llm.has_unfinished_requests() and steps < 3000:
        step()
        steps += 1
    tokens = {name: list(reply.outputs[0].token_ids) for name, reply in done.items()}
    orders = engine.orders[first:]
    return {
        "hits": [tokens.get(f"hit-{number}-{at}") for at in range(len(prompts))],
        "finish": [done[f"hit-{number}-{at}"].outputs[0].finish_reason for at in range(len(prompts))],
        "talk": tokens.get(f"talk-{number}"),
        "joins": sum(len(order.joins) for order in orders),
        "background": sum(len(order.background) for order in orders),
        "inside": sum(len(order.loads) for order in orders),
        **engine.drain(),
    }


def told(log, run_id):
    """Of each receipt of a run, what the policy has to do with."""
    receipts = receipts_in(log.lines, f"hit-{run_id}-")
    log.lines.clear()
    return [[r.mode, r.window, r.reason, r.loaded_tokens, r.verified, r.miss] for r in receipts]


def modes(engine, log, *prompts):
    """The ways of one hit, each with its receipt."""
    ids, other, short = prompts
    found, chooser = {}, engine.side.chooser
    unknown = type(chooser.rates)(engine.side.directory.clock)
    ways = {
        "alone": lambda name: beside(engine, name, ids, others=False),
        "unknown": lambda name: beside(engine, name, ids),
        "parts": lambda name: beside(engine, name, ids),
        "two": lambda name: beside(engine, name, ids, other),
        "follower": lambda name: beside(engine, name, ids, short, apart=1),
    }
    for name, run in ways.items():
        chooser.rates = unknown if name == "unknown" else Known()
        # in two parts a load must not have ended when its first step has, however long that takes here
        engine.worker.mover._link = Link(GBPS if name in ("alone", "unknown") else GBPS / 4)
        found[name] = run(name)
        found[name]["receipts"] = told(log, name)
    engine.worker.mover._link = Link(GBPS)
    return found


def lost(engine):
    """A hit whose blocks go before they are leased, in a forward that completes blocks and saves them."""
    ids, nothing = [*prompt(60, HIT), *prompt(61, 100)], {"load": False, "save": False}
    params = {"extra_args": {"kv_transfer_params": {"layercast": nothing}}}
    run = {"want": engine.run(ids, params=params)["replies"][0]["tokens"]}
    engine.run(ids[: HIT + 1])
    engine.drain()
    troubles = Troubles(engine, random.Random(0))
    troubles.evicted(ids)
    run["hit"] = engine.run(ids)
    for undo in troubles.undo:
        undo()
    run["drained"] = engine.drain()
    return run | {"again": engine.run(ids)}


def faults(engine, count, references):
    """Faults of each kind in turn, in loads of two parts; with the answer to the same prompt after each."""
    runs, kinds = [], ["lost_byte", "late_layer", "evicted"]
    for number in range(count):
        kind, ids = kinds[number % 3], references[number % 4][0]
        engine.run(ids[: HIT + 1])
        engine.drain()
        troubles = Troubles(engine, random.Random(number))
        getattr(troubles, kind)(ids[: HIT + 8])
        run = beside(engine, f"fault{number}", ids, apart=0)
        for undo in troubles.undo:
            undo()
        again = engine.run(ids, params=KEEP)["replies"][0]
        run |= {"kind": kind, "equal": run["hits"][0] == references[number % 4][1]}
        run |= {"again": again["tokens"] == references[number % 4][1], "cached": again["cached"]}
        runs.append(run)
    return runs


def unscheduled(engine, ids, short):
    """A load fails in its second part while its request finds no memory for the rest; it is aborted, another asks."""
    llm, pool = engine.llm.llm_engine, engine.scheduler.kv_cache_manager.block_pool
    nothing = {"extra_args": {"kv_transfer_params": {"layercast": {"load": False, "save": False}}}}
    run = {"want": engine.run(short, params=nothing)["replies"][0]["tokens"]}
    engine.run(ids[: HIT + 1])
    engine.drain()
    engine.side.chooser.rates = Known()
    assert engine.llm.reset_prefix_cache()
    for block in range(HIT // BLOCK):
        engine.flip(engine.slot(ids[: HIT + 8], block), 3)
    troubles, held, landed = Troubles(engine, random.Random(0)), queue.SimpleQueue(), False
    troubles.stalled(3, held.put)
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False, **KEEP)
    llm.add_request("talk-away", {"prompt_token_ids": TALK}, sampling)
    llm.step()
    llm.add_request("away", {"prompt_token_ids": ids}, sampling)
    llm.step()
    known = next(known for name, known in engine.connector.tracked.items() if name.startswith("away"))
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 1)
    forwards = engine.connector._forwards
    while known not in forwards.failed:
        if forwards.coming and not landed:  # before the step that would wait for it, however late it is submitted
            held.get(timeout=SOON_S).land()
            landed = True
        llm.step()
    troubles.undo[0]()
    run |= {"failed": known in forwards.failed, "mode": known.decision.mode, "status": known.request.status.name}
    llm.abort_request(["away", "talk-away"])
    pool.free_blocks(taken)
    after = engine.run(short, params=nothing, keep_local=True)["replies"][0]
    return run | {"tokens": after["tokens"], **engine.drain()}


def main(folder, count):
    log, ours = Log(), logging.getLogger("layercast")
    ours.addHandler(log)
    ours.setLevel(logging.INFO)
    path, facts = model(folder, "llama"), {}
    for name, caching in (("plain", False), ("caching", True)):
        pool = {"layer_wait_ms": WAIT_MS, "layerwise_exposed_ms": 0.5}
        engine = Engine(path, pool=pool, enable_prefix_caching=caching)
        references = []
        for seed in range(4):
            ids = [*prompt(seed, HIT), *prompt(50 + seed, REST)]
            references.append((ids, engine.run(ids, params=KEEP)["replies"][0]["tokens"]))
        run = {"blocks": engine.blocks, "talk": engine.run(TALK, tokens=60, params=KEEP)["replies"][0]["tokens"]}
        prompts = [references[0][0], *([*prompt(0, HIT), *prompt(seed, rest)] for seed, rest in ((77, REST), (78, 5)))]
        run["wants"] = [engine.run(ids, params=KEEP)["replies"][0]["tokens"] for ids in prompts]
        engine.pace(GBPS)
        passing = Passing(get_kv_transfer_group())
        engine.run(prompts[0][: HIT + 1])
        engine.drain()
        engine.run(prompts[0], params=KEEP)
        costs = engine.side.chooser.rates.estimate
        run["costs"] = [costs.link_bytes_per_s, costs.token_s, costs.forward_s]
        run["modes"] = modes(engine, log, *prompts)
        run["faults"] = faults(engine, int(count), references)
        run["lost"] = lost(engine)
        run["unscheduled"] = unscheduled(engine, references[0][0], prompts[2])
        run["unasked"] = passing.count
        run["threads"] = engine.close()
        facts[name] = run
    tell(facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
