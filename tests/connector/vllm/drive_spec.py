"""Speculative decoding: n-grams, a draft model (the model itself, so that it is right), an EAGLE head."""

import json
import sys
from pathlib import Path

import torch
from lab import BLOCK, Engine, model, prompt, tell
from safetensors.torch import save_file
from tiny_models import BASE


def eagle(folder):
    """An EAGLE head of one layer with seeded random weights."""
    path = Path(folder) / "eagle"
    path.mkdir(exist_ok=True)
    torch.manual_seed(5)
    wide, inner, heads = BASE["hidden_size"], BASE["intermediate_size"], 32
    shapes = {
        "fc.weight": (wide, 2 * wide),
        "layers.0.self_attn.q_proj.weight": (8 * heads, wide),
        "layers.0.self_attn.k_proj.weight": (2 * heads, wide),
        "layers.0.self_attn.v_proj.weight": (2 * heads, wide),
        "layers.0.self_attn.o_proj.weight": (wide, 8 * heads),
        "layers.0.mlp.gate_proj.weight": (inner, wide),
        "layers.0.mlp.up_proj.weight": (inner, wide),
        "layers.0.mlp.down_proj.weight": (wide, inner),
        "layers.0.post_attention_layernorm.weight": (wide,),
    }
    save_file({name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}, path / "model.safetensors")
    config = json.loads((Path(folder) / "llama" / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def accepted(engine):
    """Mean tokens a decode step has yielded since the start, from vLLM's own counters."""
    counters = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
    return counters.get("vllm:spec_decode_num_accepted_tokens", 0), counters.get("vllm:spec_decode_num_drafts", 0)


def length(engine, ids, **more):
    """A run and the acceptance length in it."""
    before = accepted(engine)
    run = engine.run(ids, tokens=40, **more)
    after = accepted(engine)
    drafts = after[1] - before[1]
    run["length"] = 1 + (after[0] - before[0]) / drafts if drafts else 1.0
    return run


def main(folder):
    path, facts = model(folder, "llama"), {}
    plain = Engine(path)
    repeats = prompt(1, 40) * 5
    facts["plain"] = [plain.run(ids, tokens=40)["replies"][0]["tokens"] for ids in (repeats, prompt(2, 230))]
    plain.close()
    for name, settings in {
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "draft": {"method": "draft_model", "model": path, "num_speculative_tokens": 3},
        "eagle": {"method": "eagle", "model": eagle(folder), "num_speculative_tokens": 2},
    }.items():
        engine = Engine(path, speculative_config=settings, disable_log_stats=False)
        run = {"blocks": engine.blocks, "layers": len(engine.worker.ways.layers), "target": len(engine.hooks._target)}
        for number, ids in enumerate((repeats, prompt(2, 230))):
            run[f"cold_{number}"] = length(engine, ids)
            run[f"warm_{number}"] = length(engine, ids)
            run[f"bytes_{number}"] = engine.loaded_bytes()
            answer = run[f"cold_{number}"]["replies"][0]["tokens"]
            run[f"turn_{number}"] = length(engine, [*ids, *answer, 9])
            engine.flip(engine.slot(repeats if number == 0 else ids, 1), 2)
            run[f"flipped_{number}"] = length(engine, ids)
        run["drained"] = engine.drain()
        run["threads"] = engine.close()
        facts[name] = run
    facts["block"] = BLOCK
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
