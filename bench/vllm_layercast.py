"""What only layercast's own connector can be asked in an engine: its hooks' time, its counts, a damaged byte."""

import logging
import statistics
import time
from collections import Counter
from contextlib import contextmanager

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from layercast.errors import Missing
from layercast.flow.orders import LoadOutcome
from layercast.landing import Landing
from layercast.move import cuda_lane
from layercast.move.base import Waits
from layercast.move.costs import Way, only
from layercast.observe.receipts import receipts_in

TIMED = 2000
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
SCHEDULER_HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_kv_connector_stats",
)
STAGES = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "wait_for_save",
    "update_connector_output",
)
GRID = cuda_lane.STAGED_GRID


def seconds_of(spans):
    """What `timed` has seen, as the seconds of each call."""
    return {name: [over - begun for begun, over in each] for name, each in spans.items()}


class Ours:
    """An engine with LayercastConnector; other orders go to the engine."""

    def __init__(self, engine):
        self.engine = engine
        self.worker_side, self.scheduler_side = get_kv_transfer_group(), engine.scheduler.connector

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def facts(self):
        hooks = self.worker_side
        return {
            **self.engine.facts(),
            "mover": type(hooks._worker.mover).__name__,
            "gate": type(hooks._worker.gates.gate).__name__,
            "in_forward": not self.scheduler_side._background,
            "settings": {name: getattr(hooks.config, name) for name in hooks.config.__struct_fields__},
            "block_bytes": [group.block_bytes for group in hooks._worker.ways.slab.layout.groups],
        }

    def loads(self, count):
        """Of the last loads: ms from the first byte to the last, and in how many pieces they were planned."""
        ended = [outcome for outcome in self.scheduler_side.outcomes if isinstance(outcome, LoadOutcome)][-count:]
        return {
            "load_ms": [round(1e3 * load.transfer_s, 2) for load in ended],
            "pieces": [load.pieces for load in ended],
        }

    def hits(self, **order):
        """As the engine's; stages, and stages_in_gpu: of each hit when its hooks were called, in ms since it was asked,
        and when its `answer` came. Of a hook: when its first call began and was over, and when its last one was over.
        spent: ms in all the gates of each hit, of which a thread passes one once the device has the layer's copies.
        """
        answer, stages = self.engine.answer, {"stages": [], "stages_in_gpu": [], "spent": []}

        def staged(*rest, **more):
            start = time.perf_counter()
            with self.timed() as spans:
                got = answer(*rest, **more)
            if "start_load_kv" in spans:
                told = {name: (*each[0], each[-1][1]) for name in STAGES if (each := spans.get(name))}
                ms = {name: [round(1e3 * (at - start), 2) for at in span] for name, span in told.items()}
                kind = "stages" if (more.get("wishes") or {}).get("load") else "stages_in_gpu"
                stages[kind].append({**ms, "answer": round(1e3 * got[0], 2)})
                if kind == "stages":
                    gates = [over - begun for begun, over in spans.get("wait_for_layer_load", ())]
                    stages["spent"].append(round(1e3 * sum(gates), 2))
            return got

        self.engine.answer = staged
        try:
            return {**self.engine.hits(**order), **{kind: each[-order["reps"] :] for kind, each in stages.items()}}
        finally:
            del self.engine.answer

    def mixed(self, **order):
        """As the engine's; how: of each hit how it was loaded, ms from the first byte to the last, and why so."""
        log, lines = logging.getLogger("layercast"), []
        keeping, level = logging.Handler(), log.level
        keeping.emit = lambda record: lines.append(record.getMessage())
        log.addHandler(keeping)
        log.setLevel(logging.INFO)
        try:
            found = self.engine.mixed(**order)
        finally:
            log.removeHandler(keeping)
            log.setLevel(level)
        receipts = receipts_in(lines, "hit-")
        return {**found, "how": [[one.mode, round(1e3 * one.transfer_s, 2), one.reason] for one in receipts]}

    def gates(self, prefix, new, reps, settle):
        """Of each hit, in ms since it was asked: `answer`, and when the device came to each layer's gate, was through
        and had its KV written. By events on the forward's stream, which cost the engine's thread microseconds each.
        """
        base, hits, start = self.tokens(prefix), [], torch.cuda.Event(enable_timing=True)
        self.answer(base)
        self.settle(settle)
        for _ in range(reps):
            self.forget()
            torch.cuda.synchronize()
            start.record()
            with self.marked() as marks:
                seconds = self.answer([*base, *self.tokens(new)], wishes={"load": True})[0]
            torch.cuda.synchronize()
            ms = [[round(start.elapsed_time(event), 2) for event in layer] for layer in marks if len(layer) == 3]
            hits.append({"answer": round(1e3 * seconds, 2), "layers": ms[: len(self.worker_side._layers)]})
        return {"hits": hits}

    @contextmanager
    def marked(self):
        """Lists of events, as layers come: before the gate, behind it, and behind what is written."""
        side, marks = self.worker_side, []
        wait, save = side.wait_for_layer_load, side.save_kv_layer

        def mark():
            marks[-1].append(event := torch.cuda.Event(enable_timing=True))
            event.record()

        def waited(*rest):
            marks.append([])
            mark()
            wait(*rest)
            mark()

        def saved(*rest, **more):
            save(*rest, **more)
            mark()

        side.wait_for_layer_load, side.save_kv_layer = waited, saved
        try:
            yield marks
        finally:
            del side.wait_for_layer_load, side.save_kv_layer

    @contextmanager
    def timed(self):
        """Hook to when each of its calls on the engine's thread was begun and over, as they come."""
        spans, undo = {}, []

        def time_calls(side, name):
            call = getattr(side, name)

            def run(*rest, **more):
                begun = time.perf_counter()
                try:
                    return call(*rest, **more)
                finally:
                    spans.setdefault(name, []).append((begun, time.perf_counter()))

            setattr(side, name, run)
            undo.append((side, name))

        for side, names in ((self.worker_side, WORKER_HOOKS), (self.scheduler_side, SCHEDULER_HOOKS)):
            for name in names:
                time_calls(side, name)
        try:
            yield spans
        finally:
            for side, name in undo:
                delattr(side, name)

    def hooks(self, prefix, new):
        """Engine thread's time in each hook, in a first sight and in a hit, and in an idle step."""
        facts, base = {}, self.tokens(prefix)
        with self.timed() as spans:
            for kind, ids in (("cold", base), ("hit", [*base, *self.tokens(new)])):
                self.settle(0.5)
                self.forget()
                spans.clear()
                seconds = self.answer(ids)[0]
                facts[kind] = {
                    name: {"calls": len(each), "sum_us": round(1e6 * sum(each), 1), "max_us": round(1e6 * max(each), 1)}
                    for name, each in seconds_of(spans).items()
                }
                facts[kind]["answer_ms"] = round(1e3 * seconds, 2)
        return {**facts, "idle_us": self._idle(), "outcomes": self.outcomes()}

    def decode_hooks(self, batch, steps):
        """Engine thread's time in hooks while `batch` requests decode: a step's, and each hook's mean share of it."""
        with self.timed() as spans:
            each, shares = [], Counter()

            def stepped():
                spent = {name: sum(times) for name, times in seconds_of(spans).items()}
                each.append(sum(spent.values()))
                shares.update(spent)
                spans.clear()

            seconds = self.engine.decode(batch, steps, stepped)["seconds"]
        us = sorted(1e6 * value for value in each)
        return {
            "steps": len(us),
            "step_ms": round(1e3 * statistics.median(seconds), 3),
            "median_us": round(statistics.median(us), 1),
            "mean_us": round(statistics.fmean(us), 1),
            "max_us": round(us[-1], 1),
            "mean_us_of": {name: round(1e6 * total / len(us), 1) for name, total in shares.most_common()},
        }

    def way(self, way):
        """From now on move by this way: "engine", "staged" (with a number: by so many programs), or as "measured"."""
        mover = self.worker_side._worker.mover
        self.costs = getattr(self, "costs", None) or {key[0]: arm.lane.costs for key, arm in mover._arms.items()}
        cuda_lane.STAGED_GRID = int(way.removeprefix("staged") or GRID) if way.startswith("staged") else GRID
        forced = {"engine": Way.ENGINE, "staged": Way.STAGED}.get(way.rstrip("0123456789"))
        mover.prefer(only(forced) if forced else self.costs)
        return {direction: str(costs) for direction, costs in self.costs.items()}

    def _idle(self):
        """A step with nothing to do, on both sides."""
        self.settle(0.5)
        output = self.scheduler.schedule()
        active = self.runner.kv_connector
        start = time.perf_counter()
        for _ in range(TIMED):
            output.kv_connector_metadata = self.scheduler_side.build_connector_meta(output)
            active.no_forward(output)
        return round(1e6 * (time.perf_counter() - start) / TIMED, 2)

    def outcomes(self):
        """How the last loads and saves ended."""
        ended = list(self.scheduler_side.outcomes)[-6:]
        return [
            {name: str(getattr(end, name)) for name in end.__struct_fields__ if name != "bad_slots"} for end in ended
        ]

    def troubles(self):
        """Loads that have not landed and saves that were not made, of the last thousand; then they are forgotten."""
        ended = self.scheduler_side.outcomes
        bad = [end for end in ended if getattr(end, "end", "landed") != "landed" or not getattr(end, "saved", True)]
        ended.clear()
        return [{name: str(getattr(end, name)) for name in end.__struct_fields__} for end in bad[:20]]

    def fault(self, prefix, new, tokens):
        """A load that fails inside a forward: what comes of it, beside the same prompt computed without the pool."""
        base, tail = self.tokens(prefix), self.tokens(new)
        self.answer(base)
        self.settle(0.5)
        rights = []
        for _ in range(2):
            self.forget()
            rights.append(self.answer([*base, *tail], tokens, {"load": False, "save": False})[1].outputs[0].token_ids)
        self.settle(0.5)
        self.forget()
        issuer = self.worker_side._worker.issuer
        mover, number = issuer._mover, [0]

        class Failing:
            """The mover, but for one copy of the next load that is never made."""

            def submit_all(self, batches, *, after=(), keep=(), waits=Waits.IDLE):
                number[0] += 1
                if number[0] > 1:
                    return mover.submit_all(batches, after=after, keep=keep, waits=waits)
                flights = list(mover.submit_all(batches[:-1], after=after[:-1], keep=keep, waits=waits))
                lost = Landing()
                lost.fail(Missing("a copy that was never made"))
                return [*flights, lost]

            def __getattr__(self, name):
                return getattr(mover, name)

        issuer._mover = Failing()
        seconds, got = self.answer([*base, *tail], tokens)
        issuer._mover = mover
        return {
            "equal": rights[1] == got.outputs[0].token_ids,
            "reproducible": rights[0] == rights[1],
            "finish": got.outputs[0].finish_reason,
            "ms": round(1e3 * seconds, 2),
            "outcomes": self.outcomes(),
        }
