"""One engine of vLLM on a GPU that does what it is told, a line of JSON at a time, and answers in lines "REPLY {...}".

    python bench/vllm_engine.py '{"model": FOLDER, "kv": KVTransferConfig or null, "blocks": 6000, ...}'

Orders: {"do": "hits", "prefix": P, "new": N, "reps": R}, and likewise the other public methods below; "end" ends it.
Weights are random normal values from a fixed seed, drawn where vLLM would make dummy ones: what is not loaded right
shows in the tokens. Used by bench_vllm_gpu.py and families_vllm_gpu.py, which know the cases.
"""

import json
import os
import statistics
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

WAIT_S = 20.0


def median(values):
    return statistics.median(values) if values else None


def part(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def draw_weights(module, seed=7):
    """Random weights that keep activations near 1 from layer to layer, and a state for some hundred tokens."""
    device = next(module.parameters()).device
    draw = torch.Generator(device=device).manual_seed(seed)
    for name, weights in module.named_parameters():
        if weights.ndim < 2:
            weights.data.fill_(1.0 if "norm" in name else -0.01 if name.endswith(".A") else 0.0)
        else:
            scale = 1.0 if "embed" in name else weights.shape[-1] ** -0.5
            for row in weights.data.split(8192):
                row.copy_(torch.randn(row.shape, generator=draw, device=device, dtype=torch.float32) * scale)


class Engine:
    def __init__(self, case):
        more = {"kv_transfer_config": KVTransferConfig(**case["kv"])} if case["kv"] else {}
        start = time.perf_counter()
        DummyModelLoader.load_weights = lambda loader, model, config: draw_weights(model)
        settings = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 32768,
            "max_num_batched_tokens": 16384,
            "gpu_memory_utilization": 0.2,  # only asked of what is free at the start; the next line counts
            "kv_cache_memory_bytes": case["kv_bytes"],
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        self.llm = LLM(model=case["model"], **{**settings, **more, **case.get("engine", {})})
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.device = next(self.runner.model.parameters()).device
        self.draw, self.number = torch.Generator().manual_seed(case.get("seed", 1)), 0
        self.cores = os.sched_getaffinity(0)
        self.bases = {}
        """Shape of hits to the prefixes that were seen for them."""
        self.block_size = self.core.vllm_config.cache_config.block_size
        self.vocabulary = self.core.vllm_config.model_config.get_vocab_size()
        self.up_s = time.perf_counter() - start
        for _ in range(2):
            self.answer(ids := self.tokens(2048))
        self.settle(0.5)
        self.forget()
        # By a load, so that whoever loads has its threads before this one is kept on a core, which they would inherit.
        self.answer(ids, wishes={"load": True} if case.get("layercast") else None)

    def facts(self):
        graphs = str(self.core.vllm_config.compilation_config.cudagraph_mode)
        return {
            "up_s": round(self.up_s, 1),
            "cudagraph_mode": graphs,
            "async_scheduling": bool(self.core.vllm_config.scheduler_config.async_scheduling),
            "runner": type(self.runner).__module__,
            "gpu_memory_gib": round(torch.cuda.memory_allocated() / 2**30, 2),
        }

    def tokens(self, count):
        return torch.randint(5, self.vocabulary, (count,), generator=self.draw).tolist()

    def answer(self, ids, tokens=2, wishes=None):
        """(seconds to the first token, reply) of one request alone. wishes: what it asks of layercast's pool.

        With more than one token its end, which nobody waits for, is not in the time of the first.
        """
        extra = {"extra_args": {"kv_transfer_params": {"layercast": wishes}}} if wishes else {}
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **extra)
        self.number += 1
        start, first = time.perf_counter(), None
        self.engine.add_request(f"answer-{self.number}", {"prompt_token_ids": ids}, sampling)
        while True:
            for reply in self.engine.step():
                first = first or time.perf_counter() - start
                if reply.finished:
                    return first, reply

    def idle(self, seconds=0.0):
        """Step as an engine without requests does, until its connector has nothing to report, and for `seconds`."""
        until = time.perf_counter() + seconds
        while self.core.batch_queue or self.scheduler.has_requests() or time.perf_counter() < until:
            if self.core.batch_queue or self.scheduler.has_requests():
                self.core.step_fn()
            else:
                time.sleep(0.001)

    def forget(self):
        """Empty the GPU's prefix cache, once whatever a connector still does with its blocks is over."""
        until = time.perf_counter() + WAIT_S
        while time.perf_counter() < until:
            self.idle()
            if self.llm.reset_prefix_cache():
                return
            self.answer(self.tokens(8))  # a step in which a connector can let go; of less than a block
        raise SystemExit("the GPU's prefix cache could not be emptied: the connector holds blocks")

    def settle(self, seconds):
        """Let a connector finish its saves: idle steps, for so long at least, and a step with a request."""
        self.idle(seconds)
        self.answer(self.tokens(8))
        self.idle()

    # ---- orders ----

    def move(self, core):
        """Go on with this thread alone on that processor core, and with all others elsewhere; null: as at the start.

        A thread has the cores of the one that makes it, so that some made meanwhile may have been left on another core.
        """
        for thread in map(int, os.listdir("/proc/self/task")):
            mine = core is not None and thread == threading.get_native_id()
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, {core} if mine else self.cores - {core})

    def hits(self, prefix, new, reps, settle=0.5, wishes=None):
        """Hits behind prefixes from the connector, then from GPU memory; first sights of these the first time.

        Seconds of each: cold, hit, in_gpu. cached: tokens that the two kinds of hits had. missed: what layercast says
        of hits that were none, where `wishes` ask it.
        """
        found = {"cold": [], "hit": [], "in_gpu": [], "cached": [], "missed": []}
        bases = self.bases.setdefault(f"{prefix}+{new}", [])
        while len(bases) < 3:
            bases.append(self.tokens(prefix))
            found["cold"].append(self.answer(bases[-1])[0])
            self.settle(settle)
        for number in range(reps + 1):
            base = bases[number % len(bases)]
            self.forget()
            seconds, reply = self.answer([*base, *self.tokens(new)], wishes=wishes)
            again, same = self.answer([*base, *self.tokens(new)])
            if number:  # the first warms up
                found["hit"].append(seconds)
                found["in_gpu"].append(again)
                found["cached"].append((reply.num_cached_tokens, same.num_cached_tokens))
                found["missed"] += [reply.kv_transfer_params] if not reply.num_cached_tokens else []
        return found

    def cold(self, prefix, reps):
        """First sights: seconds of each."""
        out = [self.answer(self.tokens(prefix))[0] for _ in range(reps)]
        self.settle(0.2)
        self.forget()
        return {"seconds": out}

    def decode(self, batch, steps, stepped=lambda: None):
        """Seconds of each step in which all of `batch` requests decode; `stepped` is called behind each of them.

        What these all leave to be saved, at one time, is over before it returns: `loop` has it beside the steps.
        """
        sampling = SamplingParams(temperature=0.0, max_tokens=steps + 12, ignore_eos=True, detokenize=False)
        for _ in range(batch):
            self.number += 1
            self.engine.add_request(f"decode-{self.number}", {"prompt_token_ids": self.tokens(64)}, sampling)
        stamps = []
        while self.engine.has_unfinished_requests():
            got = self.engine.step()
            if len(got) == batch and not any(reply.finished for reply in got):
                stamps.append(time.perf_counter())
                stepped()
        stamps = stamps[4:]
        self.settle(0.5)
        return {"seconds": [b - a for a, b in pairwise(stamps)]}

    def loop(self, batch, seconds, seed):
        """Tokens/s and seconds of each step while `batch` requests run: who has its 128 to 384 tokens is replaced."""
        draw, running, counted, stamps = torch.Generator().manual_seed(seed), set(), 0, []
        begun = time.perf_counter()
        while True:
            while len(running) < batch:
                least = 128 if stamps else 1  # the first ones end at all times
                most = least + int(torch.randint(0, 257, (1,), generator=draw))
                sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
                self.number += 1
                running.add(name := f"loop-{self.number}")
                self.engine.add_request(name, {"prompt_token_ids": self.tokens(64)}, sampling)
            got, now = self.engine.step(), time.perf_counter()
            running -= {reply.request_id for reply in got if reply.finished}
            if now - begun > 1.0:  # by then all run
                counted += len(got) if stamps else 0
                stamps.append(now)
            if now - begun > 1.0 + seconds:
                break
        self.engine.abort_request(list(running))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.settle(0.5)
        times = [b - a for a, b in pairwise(stamps)]
        return {"tokens_per_s": counted / (stamps[-1] - stamps[0]), "seconds": times}

    def mixed(self, running, prefix, new, count, every_s):
        """Seconds between tokens of `running` decodes while a hit arrives each `every_s` seconds; the hits' TTFT.

        since: at the end of each gap, how long the last hit has been there.
        """
        bases = [self.tokens(prefix) for _ in range(count)]
        for base in bases:
            self.answer(base)
            self.settle(0.1)
        self.forget()
        sampling = SamplingParams(temperature=0.0, max_tokens=20000, ignore_eos=True, detokenize=False)
        names = [f"run-{self.number}-{i}" for i in range(running)]
        self.number += 1
        for name in names:
            self.engine.add_request(name, {"prompt_token_ids": self.tokens(64)}, sampling)
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        warm_until = time.perf_counter() + 1.0
        while time.perf_counter() < warm_until:
            self.engine.step()
        begun, asked, first, last = time.perf_counter(), {}, {}, None
        gaps, since, cached = [], [], []
        while len(first) < count or len(gaps) < 50:
            now = time.perf_counter()
            if len(asked) < count and now - begun >= every_s * len(asked):
                name = f"hit-{self.number}-{len(asked)}"
                ids = [*bases[len(asked)], *self.tokens(new)]
                asked[name] = now
                self.engine.add_request(name, {"prompt_token_ids": ids}, one)
            got, now = self.engine.step(), time.perf_counter()
            for reply in got:
                if reply.request_id in asked and reply.finished:
                    first[reply.request_id] = now - asked[reply.request_id]
                    cached.append(reply.num_cached_tokens)
            if any(reply.request_id in names for reply in got):
                if last:
                    gaps.append(now - last)
                    since.append(now - next(reversed(asked.values())))
                last = now
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.settle(0.5)
        self.forget()
        return {"gaps": gaps, "since": since, "ttft": list(first.values()), "cached": cached}

    def poisson(self, prefixes, prefix, new, tokens, count, rate, seed):
        """TTFT and tokens/s of `count` requests over some prefixes, at Poisson arrivals; rate 0: as fast as it can."""
        draw = torch.Generator().manual_seed(seed)
        if not hasattr(self, "stock"):
            self.stock = [self.tokens(prefix) for _ in range(prefixes)]
            for base in self.stock:
                self.answer(base)
                self.settle(0.1)
        self.forget()
        gaps = (-torch.log(torch.rand(count, generator=draw)) / rate).tolist() if rate else [0.0] * count
        due = torch.tensor(gaps).cumsum(0).tolist()
        which = torch.randint(0, len(self.stock), (count,), generator=draw).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun, asked, first, done = time.perf_counter(), {}, {}, 0
        while done < count:
            now = time.perf_counter() - begun
            while len(asked) < count and due[len(asked)] <= now:
                self.number += 1
                name = f"poisson-{self.number}"
                ids = [*self.stock[which[len(asked)]], *self.tokens(new)]
                asked[name] = due[len(asked)]
                self.engine.add_request(name, {"prompt_token_ids": ids}, sampling)
            if not self.engine.has_unfinished_requests():
                time.sleep(0.0002)
                continue
            got, now = self.engine.step(), time.perf_counter() - begun
            for reply in got:
                if reply.request_id in asked and reply.outputs[0].token_ids:
                    first.setdefault(reply.request_id, now - asked[reply.request_id])
                    done += reply.finished
        spent, times = time.perf_counter() - begun, list(first.values())
        return {
            "seconds": spent,
            "requests_per_s": count / spent,
            "tokens_per_s": count * tokens / spent,
            "ttft": {"p50_ms": 1e3 * part(times, 0.5), "p99_ms": 1e3 * part(times, 0.99)},
        }

    def link(self):
        """GB/s of plain copies of 1 GiB."""
        host, facts = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), {}
        device = torch.empty_like(host, device=self.device)
        for name, target, source in (("h2d", device, host), ("d2h", host, device)):
            times = []
            for _ in range(9):
                torch.cuda.synchronize()
                start = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            facts[f"{name}_gb_s"] = round((1 << 30) / median(times) / 1e9, 2)
        facts["card"], facts["torch"] = torch.cuda.get_device_name(), torch.__version__
        return facts

    @property
    def caches(self):
        """Each layer's KV, by block."""
        layers = self.core.vllm_config.compilation_config.static_forward_context
        caches = [layer.kv_cache for layer in layers.values() if hasattr(layer, "kv_cache")]
        return [cache[0] if isinstance(cache, list) else cache for cache in caches]

    def placed(self, ids, tokens=2, wishes=None):
        """(reply, the blocks that its prompt had) of one request alone."""
        manager, taken = self.scheduler.kv_cache_manager, []
        allocate = manager.allocate_slots

        def noted(request, *rest, **more):
            out = allocate(request, *rest, **more)
            taken.append(list(manager.get_block_ids(request.request_id)[0]))
            return out

        manager.allocate_slots = noted
        reply = self.answer(ids, tokens, wishes)[1]
        manager.allocate_slots = allocate
        return reply, max(taken, key=len)[: len(ids) // self.block_size]

    def kept(self, blocks):
        """A copy of these blocks in every layer, once the device is done with them."""
        torch.cuda.synchronize()
        at = torch.tensor(blocks, device=self.device)
        return [cache[at].clone() for cache in self.caches]

    def same(self, prefix, new, tokens, count):
        """Hits from the connector against hits from GPU memory: tokens, and the KV bytes behind them."""
        facts = {"tokens_equal": 0, "bytes_equal": 0, "bytes": 0, "cached": [], "runs": count}
        for _ in range(count):
            base, tail = self.tokens(prefix), self.tokens(new)
            kept = self.kept(self.placed(base)[1])
            self.settle(0.5)
            self.answer([*base, *tail])
            near = self.answer([*base, *tail], tokens)[1]
            self.settle(0.5)
            self.forget()
            for cache in self.caches:  # what is not loaded is to be seen
                cache[torch.randperm(len(cache), device=self.device)[: len(cache) // 2]] += 1
            torch.cuda.synchronize()  # the connector knows of what vLLM writes; this it would overtake
            far, blocks = self.placed([*base, *tail], tokens)
            found = self.kept(blocks[: len(kept[0])])
            facts["bytes_equal"] += all(map(torch.equal, found, kept))
            facts["bytes"] += sum(saved.numel() * saved.element_size() for saved in kept)
            facts["tokens_equal"] += near.outputs[0].token_ids == far.outputs[0].token_ids
            facts["cached"].append([near.num_cached_tokens, far.num_cached_tokens])
            facts["distinct"] = len(set(far.outputs[0].token_ids))
            self.settle(0.2)
            self.forget()
        return facts

    def sound(self, seeds, **arrivals):
        """Whether what Poisson arrivals have left of their prefixes in GPU memory is what was computed, to the byte."""
        self.poisson(**arrivals, seed=0)
        kept = []
        for base in self.stock:
            self.forget()
            kept.append(self.kept(self.placed(base, wishes={"load": False})[1]))
        facts = {"blocks": 0, "wrong_blocks": 0, "bytes": 0, "prefixes": []}
        for seed in seeds:
            self.poisson(**arrivals, seed=seed)
            prefixes = 0
            for base, right in zip(self.stock, kept, strict=True):
                reply, blocks = self.placed([*base, *self.tokens(16)], wishes={"load": False, "save": False})
                held = min(reply.num_cached_tokens // self.block_size, len(right[0]))
                if not held:
                    continue
                for found, layer in zip(self.kept(blocks[:held]), right, strict=True):
                    wrong = (found != layer[:held]).flatten(1).any(1)
                    facts["blocks"] += held
                    facts["wrong_blocks"] += int(wrong.sum())
                    facts["bytes"] += found.numel() * found.element_size()
                prefixes += 1
            facts["prefixes"].append(prefixes)
        return facts


def main():
    case = json.loads(sys.argv[1])
    if case.get("moves"):
        from vllm_moves import Moves as Ours
        from vllm_moves import lift
    elif case.get("layercast"):
        from vllm_layercast import Ours
    sys.stdin.readline()  # the word to begin: imports are over
    if case.get("lift"):
        lift()
    engine = Engine(case)
    if case.get("layercast"):
        engine = Ours(engine)
    print("REPLY " + json.dumps(engine.facts()), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "end":
            break
        what = getattr(engine, order.pop("do"))
        print("REPLY " + json.dumps(what(**order)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # engines' atexit handlers outlive their usefulness on a machine that is about to go


if __name__ == "__main__":
    main()
