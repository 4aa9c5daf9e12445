"""A real engine of vLLM on the CPU, driven through the connector in a process of its own; prints facts as JSON.

Usage: python drive_vllm.py FOLDER      FOLDER takes the weights of a seeded Llama, wider than lab's.
"""

import copy
import random
import sys
import threading
from dataclasses import replace

import torch
import xxhash
from lab import Watch, tell
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from layercast.connector.vllm import NAME, register
from layercast.errors import Refused

BLOCK, PROMPT, LAYERS = 128, 300, 4
SAMPLING = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1)


def tiny_llama(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def engine(model, **settings):
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        block_size=BLOCK,
        kv_cache_memory_bytes=32 << 20,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LayercastConnector",
            kv_connector_module_path="layercast.connector.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"host_bytes": 16 << 20, **settings},
        ),
    )


def answers(llm, prompts, extra):
    asked = [{"prompt_token_ids": prompt, **extra} for prompt in prompts]
    done = llm.generate(asked, SAMPLING, use_tqdm=False)
    return [
        {
            "tokens": list(reply.outputs[0].token_ids),
            "logprobs": [
                at[token].logprob
                for at, token in zip(reply.outputs[0].logprobs, reply.outputs[0].token_ids, strict=True)
            ],
            "cached": reply.num_cached_tokens,
            "finish": reply.outputs[0].finish_reason,
        }
        for reply in done
    ]


def run(llm, watch, *prompts, keep_local=False, **extra):
    """Answer the prompts; vLLM's own prefix cache is emptied before, unless `keep_local`."""
    assert keep_local or llm.reset_prefix_cache()
    core = llm.llm_engine.engine_core.engine_core
    scheduler, connector = core.scheduler, core.scheduler.connector
    watch.clear(), connector.outcomes.clear()
    replies = answers(llm, prompts, extra)
    while scheduler.has_requests():  # as an idle engine steps, until its last saves have been reported
        core.step_fn()
    outcomes = list(connector.outcomes)
    return {
        "replies": replies,
        **watch.facts(),
        "loads": [[o.end, o.verified, o.nbytes, o.layers, len(o.bad_slots)] for o in outcomes if hasattr(o, "end")],
        "saves": [[o.saved, o.nbytes, o.layers, o.swept_layers] for o in outcomes if hasattr(o, "saved")],
        "idle": connector.side.idle,
        "requests": len(connector.tracked) + len(connector.side._names),
        "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "stored": sum(len(shelf.stored) for shelf in connector.side.directory._shelves),
    }


def slot_of(side, prompt, block):
    return side.directory._shelves[0].stored[side.match(prompt).keys[0][block]]


def flip(slab, slot, layer):
    """Damage one byte of one layer of a stored block."""
    data = bytearray(slab.read(0, slot, layer))
    data[len(data) // 3] ^= 1
    slab.write(0, slot, layer, bytes(data))


def forge(slab, slot):
    """Replace a stored block by another content in all layers, with digests that agree with it."""
    for layer in range(LAYERS):
        data = slab.read(0, slot, layer)[::-1]
        slab.write(0, slot, layer, data)
        slab.digests[0][layer, slot] = xxhash.xxh3_64_intdigest(data)


def refusal(connector, **changes):
    """Why a connector for this engine, but for the changes, is refused."""
    config, caches = copy.copy(connector._vllm_config), copy.copy(connector._kv_cache_config)
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.parallel_config = copy.copy(config.parallel_config)
    places = [caches, config.kv_transfer_config, config.parallel_config]
    for name, value in changes.items():
        setattr(next(place for place in places if hasattr(place, name)), name, value)
    try:
        type(connector)(config, KVConnectorRole.SCHEDULER, caches)
    except Refused as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder):
    register()
    register()
    llm = engine(tiny_llama(f"{folder}/wide_llama"))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    hooks, connector = get_kv_transfer_group(), scheduler.connector
    slab, watch, draw = hooks._worker.ways.slab, Watch(connector, hooks), random.Random(7)
    prompt, other = ([draw.randrange(5, 2000) for _ in range(PROMPT)] for _ in range(2))
    facts = {
        "by_name": KVConnectorFactory.get_connector_class_by_name(NAME) is type(connector),
        "piecewise": type(connector).requires_piecewise_for_cudagraph({}),
        "blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "cold": run(llm, watch, prompt),
        "warm": run(llm, watch, prompt),
        "salted": run(llm, watch, prompt, cache_salt="tenant"),
        "head": run(llm, watch, prompt[:200]),
        "local_head": run(llm, watch, prompt, keep_local=True),
        "other": run(llm, watch, other),
        "both": run(llm, watch, prompt, other),
    }
    flip(slab, slot_of(connector.side, prompt, 1), LAYERS - 1)
    facts["flipped"] = run(llm, watch, prompt)
    facts["mended"] = run(llm, watch, prompt)
    forge(slab, slot_of(connector.side, prompt, 0))
    facts["forged"] = run(llm, watch, prompt)
    groups = connector._kv_cache_config.kv_cache_groups
    facts["refused"] = {
        "nothing": refusal(connector),
        "setting": refusal(connector, kv_connector_extra_config={"host_byte": 1}),
        "pipeline": refusal(connector, pipeline_parallel_size=2),
        "groups": refusal(connector, kv_cache_groups=[replace(groups[0], kv_cache_spec=None)]),
    }
    llm.llm_engine.engine_core.shutdown()
    facts["threads"] = [thread.name for thread in threading.enumerate() if "layercast" in thread.name]
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
