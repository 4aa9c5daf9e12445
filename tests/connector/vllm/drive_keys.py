"""What besides tokens names KV: salts, adapters, wishes of a request, a reset pool, vLLM's own prefix cache."""

import io
import json
import logging
import sys
from pathlib import Path

import torch
from lab import BLOCK, Engine, model, prompt, tell
from safetensors.torch import save_file
from tiny_models import BASE
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest

from layercast.observe.receipts import receipts_in

RANK = 4


def adapter(folder, seed):
    """A tiny LoRA of the query projections with seeded random weights."""
    path = Path(folder) / f"adapter-{seed}"
    path.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    wide, tall = BASE["hidden_size"], 8 * 32
    weights = {}
    for layer in range(BASE["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        weights |= {f"{name}A.weight": torch.randn(RANK, wide), f"{name}B.weight": torch.randn(tall, RANK)}
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def ask(**wishes):
    return {"extra_args": {"kv_transfer_params": {"layercast": wishes}}}


def told_of(event):
    return getattr(event, "medium", None) == "CPU"


def listen(engine):
    """A list that takes what the engine publishes of the pool."""
    published, publisher = [], engine.scheduler.kv_event_publisher
    publisher.publish = lambda batch: published.extend(event for event in batch.events if told_of(event))
    return published


def told(event):
    return [
        type(event).__name__,
        [key.hex() for key in event.block_hashes],
        *([event.parent_block_hash, event.token_ids, event.block_size] if isinstance(event, BlockStored) else []),
        event.group_idx,
    ]


def replayed(published):
    """The blocks that a listener takes for stored."""
    found = set()
    for event in published:
        (found.update if isinstance(event, BlockStored) else found.difference_update)(event.block_hashes)
    return sorted(key.hex() for key in found)


def stored(engine):
    return sorted(key.hex() for key in engine.side.directory._shelves[0].stored)


def eight_bit(path, ids, kind):
    """A hit where the cache has a byte an element, and the key of its first block."""
    engine = Engine(path, kv_cache_dtype=kind)
    cold, hit = engine.run(ids), engine.run(ids)
    found = [cold["replies"][0]["tokens"] == hit["replies"][0]["tokens"], hit["loads"], engine.loaded_bytes()]
    key = engine.side.match(ids).keys[0][0].hex()
    return [*found, key, engine.close()]


def main(folder):
    path, long, facts = model(folder, "llama"), prompt(1, 200), {}
    logger = logging.getLogger("layercast")
    logger.setLevel(logging.INFO)
    logger.handlers, logger.propagate = [logging.StreamHandler(receipts := io.StringIO())], False
    listened = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = Engine(path, enable_prefix_caching=True, disable_log_stats=False, kv_events_config=listened)
    published = listen(engine)
    facts["plain"] = engine.run(long)
    engine.drain()
    facts["events"] = [told(event) for event in published]
    facts["long"], facts["keys"] = long, [key.hex() for key in engine.side.match(long).keys[0]]
    facts["salted"] = engine.run(long, cache_salt="a")
    facts["salted_again"] = engine.run(long, cache_salt="a")
    facts["other_salt"] = engine.run(long, cache_salt="b")
    facts["own_salt"] = engine.run(long, params=ask(salt="c"))
    facts["own_salt_again"] = engine.run(long, params=ask(salt="c"))
    facts["no_load"] = engine.run(long, params=ask(load=False))
    facts["no_save"] = engine.run(prompt(2, 200), params=ask(save=False))
    facts["told"] = engine.run(long, params=ask())
    facts["unknown_wish"] = engine.run(long, params=ask(lode=False))
    facts["prompt_logprobs"] = engine.run(long, params={"prompt_logprobs": 1})
    facts["local_longer"] = [engine.run(prompt(3, 200)), engine.run(prompt(3, 200), keep_local=True)]
    facts["local_shorter"] = [engine.run(prompt(1, 70)), engine.run(long, keep_local=True)]
    engine.side.directory.forget(0, engine.side.match(long).keys[0][5:])
    facts["forgotten"] = engine.run(long)
    engine.drain()
    facts["before_reset"] = [replayed(published), stored(engine)]
    facts["reset"] = engine.llm.reset_prefix_cache(reset_connector=True)
    facts["after_reset"] = engine.run(long)
    facts["after_reset_again"] = engine.run(long)
    facts["single"] = engine.run(long, tokens=1)
    facts["drained"] = engine.drain()
    facts["last_receipt"] = receipts_in(receipts.getvalue().splitlines(), "")[-1].sentence
    facts["after_all"] = [replayed(published), [key.hex() for key in engine.side.match(long).keys[0]]]
    facts["metrics"] = [
        [metric.name, metric.labels, metric.value]
        for metric in engine.llm.get_metrics()
        if metric.name.startswith("vllm:layercast")
    ]
    facts["receipts"] = [receipt.sentence for receipt in receipts_in(receipts.getvalue().splitlines(), "")]
    facts["threads"] = engine.close()
    lora = Engine(path, enable_lora=True, max_loras=2, max_lora_rank=8)
    first, second = (LoRARequest(f"one-{seed}", seed, adapter(folder, seed)) for seed in (1, 2))
    facts["adapter"] = [lora.run(long, lora=first), lora.run(long, lora=first), lora.run(long)]
    facts["second"] = [lora.run(long, lora=second), lora.run(long, lora=second)]
    renamed = LoRARequest("another", 3, adapter(folder, 1))
    facts["renamed"] = lora.run(long, lora=renamed)
    facts["lora_drained"] = lora.drain()
    facts["lora_threads"] = lora.close()
    # What vLLM's CPU build asks of a processor before it keeps eight bits.
    able = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    facts["small"] = [eight_bit(path, long, kind) for kind in (("fp8", "fp8_e5m2") if able else ())]
    facts["block"] = BLOCK
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
