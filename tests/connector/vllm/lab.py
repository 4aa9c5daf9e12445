"""Real engines of vLLM on the CPU for the `drive_*` scripts of this folder: tiny seeded models, runs, facts as JSON.

Import it first: it sets the environment that vLLM reads when it is imported.
"""

import dataclasses
import functools
import gc
import json
import os
import random
import sys
import threading
from ctypes import string_at
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    NUMBA_NUM_THREADS="1",  # n-grams are looked up with numba, which gives torch as many threads as itself
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
)
sys.path.append(str(Path(__file__).parents[1]))

import torch._dynamo
import xxhash
from tiny_models import DEEPSEEK, EXPERTS, GRANITE4, LOCAL_EXPERTS, seeded
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

from layercast.move.paced import PacedMover

BLOCK = 32
MODELS = {
    "llama": ("LlamaConfig", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 32, **EXPERTS, "moe_intermediate_size": 64}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": ("GptOssConfig", {"head_dim": 32, "sliding_window": 64, **LOCAL_EXPERTS}),
    "deepseek_v3": (
        "DeepseekV3Config",
        DEEPSEEK
        | {
            "first_k_dense_replace": 4,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "qk_nope_head_dim": 32,
        },
    ),
    "granite4h": ("GraniteMoeHybridConfig", GRANITE4 | {"num_attention_heads": 4}),
}


def model(folder, name):
    """The folder of a tiny model with seeded random weights, made once."""
    path = Path(folder) / name
    if not path.exists():
        seeded(*MODELS[name]).save_pretrained(path)
    return str(path)


def prompt(seed, tokens):
    draw = random.Random(seed)
    return [draw.randrange(5, 500) for _ in range(tokens)]


def without_checkpoints():
    """vLLM's CPU kernels can't export a recurrent state inside a chunk, so chunks must end at block boundaries."""
    spec_of = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self, config):
        return dataclasses.replace(spec_of(self, config), num_prefill_checkpoint_blocks=0)

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec


def register_overrides_once():
    """vLLM's scan for kernels to override trips over modules that a first engine has imported; once is enough."""
    register = CpuPlatform.register_triton_kernel_overrides
    CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(register))


def without_compiling():
    """A sampler's first log probability is not compiled, for seconds, nor a model looked at in a process of its own."""
    torch._dynamo.config.disable = True
    registry._run_in_subprocess = lambda look: look()


register_overrides_once()
without_compiling()


def settings_of(pool=None, policy="recompute", role="kv_both"):
    """Arguments of a small LLM with the connector; the pool's settings are `pool`."""
    transfer = KVTransferConfig(
        kv_connector="LayercastConnector",
        kv_connector_module_path="layercast.connector.vllm.connector",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"host_bytes": 16 << 20, "kv_recompute_threshold": 0, **(pool or {})},
    )
    return {
        "kv_transfer_config": transfer,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 32 << 20,
        "enable_prefix_caching": False,
    }


class Watch:
    """Notes what the hooks see, the scheduled tokens of each step, and forwards for which something is ordered."""

    def __init__(self, scheduler, worker):
        self.scheduled, self.waited, self.written, self.moving = [], [], [], []
        build, wait, save = scheduler.build_connector_meta, worker.wait_for_layer_load, worker.save_kv_layer

        def build_connector_meta(output):
            self.scheduled.append(output.total_num_scheduled_tokens)
            made = build(output)
            self.moving += [made] if made.orders is not None and output.total_num_scheduled_tokens else []
            return made

        def wait_for_layer_load(name):
            self.waited.append(name)
            wait(name)

        def save_kv_layer(name, *rest):
            self.written.append(name)
            save(name, *rest)

        scheduler.build_connector_meta = build_connector_meta
        worker.wait_for_layer_load, worker.save_kv_layer = wait_for_layer_load, save_kv_layer

    def clear(self):
        for log in (self.scheduled, self.waited, self.written, self.moving):
            log.clear()

    def facts(self):
        return {
            "scheduled": [tokens for tokens in self.scheduled if tokens],
            "idle_steps": self.scheduled.count(0),
            "waited": len(self.waited),
            "written": len(self.written),
            "moving": len(self.moving),
            "layer_names": len(set(self.waited)),
        }


class Engine:
    """One engine with the connector, from construction to `close`; the pool's settings are `pool`."""

    def __init__(self, path, *, pool=None, policy="recompute", role="kv_both", **settings):
        self.orders, self.preemptions = [], 0
        self.llm = LLM(model=path, **{**settings_of(pool, policy, role), **settings})
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.hooks, self.connector = get_kv_transfer_group(), self.scheduler.connector
        self.side, self.worker = self.connector.side, self.hooks._worker
        self.slab = self.worker.ways.slab
        self.blocks = self.free_blocks
        self.watch = Watch(self.connector, self.hooks)
        self._watch()

    def _watch(self):
        """Note orders as they begin, and count preemptions."""
        begin, preempt = self.worker.begin, self.scheduler._preempt_request

        def noted(orders, after=()):
            self.orders.append(orders)
            return begin(orders, after)

        def preempted(*rest, **more):
            self.preemptions += 1
            preempt(*rest, **more)

        self.worker.begin, self.scheduler._preempt_request = noted, preempted

    @property
    def free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def run(self, *prompts, tokens=8, logprobs=1, keep_local=False, params=None, lora=None, **extra):
        """Answer the prompts, and say what it took; vLLM's own prefix cache is emptied before, unless `keep_local`."""
        assert keep_local or self.llm.reset_prefix_cache()
        self.watch.clear(), self.connector.outcomes.clear()
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs, **(params or {})
        )
        asked = [{"prompt_token_ids": ids, **extra} for ids in prompts]
        done = self.llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        return {"replies": [_reply(reply) for reply in done], **self.facts()}

    def loaded_bytes(self):
        """Bytes of the last load, found equal in the engine's blocks and in their slots."""
        order = next(load for orders in reversed(self.orders) for load in (*orders.loads, *orders.background))
        count = 0
        for pair in order.pairs:
            engine = self.worker.ways.loading[pair.group].plan(pair.slots, pair.blocks)
            for layer in engine.layers:
                pieces = engine.layer(layer)
                rows = (pieces.source, pieces.target, pieces.length, pieces.count)
                for source, target, length, times, step, jump in zip(
                    *(row.tolist() for row in (*rows, pieces.source_stride, pieces.target_stride)), strict=True
                ):
                    for i in range(times):
                        assert string_at(source + i * step, length) == string_at(target + i * jump, length)
                        count += length
        return count

    def facts(self):
        outcomes = list(self.connector.outcomes)
        return {
            **self.watch.facts(),
            "loads": [[o.end, o.verified, o.nbytes, o.layers, len(o.bad_slots)] for o in outcomes if hasattr(o, "end")],
            "saves": [[o.saved, o.nbytes, o.layers, o.swept_layers] for o in outcomes if hasattr(o, "saved")],
            "requests": len(self.connector.tracked) + len(self.side._names),
            "held": self.connector._holds.held,
            "free_blocks": self.free_blocks,
            "stored": [len(shelf.stored) for shelf in self.side.directory._shelves],
        }

    def pace(self, gbps):
        """From now on copies go no faster than a link of `gbps`."""
        paced = PacedMover(self.worker.mover, gbps)
        self.worker.mover = self.worker.issuer._mover = paced
        self.hooks._closing.callback(paced.close, 10)

    def drain(self):
        """Step as an idle engine does; what is left then."""
        steps = 0
        while self.scheduler.has_requests() and steps < 10_000:
            self.core.step_fn()
            steps += 1
        return {
            "steps": steps,
            "idle": self.side.idle and self.worker.idle,
            "held": self.connector._holds.held,
            "free_blocks": self.free_blocks,
            "requests": len(self.connector.tracked) + len(self.side._names),
        }

    def close(self):
        """End the engine; names of threads that it left behind."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = self.core = self.scheduler = self.hooks = self.connector = self.side = self.worker = self.slab = None
        cleanup_dist_env_and_memory()
        gc.collect()
        return [thread.name for thread in threading.enumerate() if "layercast" in thread.name]

    # ---- faults ----

    def slot(self, ids, block, group=0):
        keys = self.side.match([*ids, 0]).keys[group]
        return self.side.directory._shelves[group].stored[keys[block]]

    def flip(self, slot, layer, group=0):
        """Damage one layer of a stored block so much that whoever reads it answers otherwise."""
        data = self.slab.read(group, slot, layer)
        self.slab.write(group, slot, layer, data[len(data) // 2 :] + data[: len(data) // 2])

    def forge(self, slot, group=0):
        """Replace a stored block by another content in all layers, with digests that agree with it."""
        for row, layer in enumerate(self.slab.layout.groups[group].layers):
            data = self.slab.read(group, slot, layer)[::-1]
            self.slab.write(group, slot, layer, data)
            self.slab.digests[group][row, slot] = xxhash.xxh3_64_intdigest(data)


def _reply(reply):
    first = reply.outputs[0]
    chosen = zip(first.logprobs or (), first.token_ids, strict=False)
    return {
        "tokens": list(first.token_ids),
        "logprobs": [at[token].logprob for at, token in chosen],
        "cached": reply.num_cached_tokens,
        "finish": first.finish_reason,
        "params": reply.kv_transfer_params,
    }


def tell(facts):
    sys.stdout.write(f"FACTS {json.dumps(facts)}\n")
