"""Multi-token prediction: a target whose own MTP layer foretells it, since both compute nearly the same."""

import json
import sys
from pathlib import Path

import torch
import transformers
import xxhash
from drive_spec import length
from lab import BASE, BLOCK, Engine, prompt, tell
from safetensors.torch import load_file, save_file

QUIET = 0.05
"""Part of what layers other than the first add, so that an MTP layer like the first one foretells the whole."""


def mimo(folder):
    """A tiny MiMo: Qwen2 and an MTP layer with the weights of its first layer, which reads the token alone."""
    path, wide = Path(folder) / "mimo", BASE["hidden_size"]
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**BASE | {"num_attention_heads": 4})  # of 32 elements, the least on a CPU
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    tokens = weights["model.embed_tokens.weight"]
    tokens *= tokens.square().mean(-1, keepdim=True).rsqrt()  # the MTP layer's norm leaves these as they are
    weights["model.layers.0.self_attn.q_proj.weight"] *= 2
    weights["model.layers.0.self_attn.o_proj.weight"] *= 4  # what is looked up decides the next token
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")) and ".layers.0." not in name:
            weights[name] *= QUIET
    first = "model.layers.0."
    mtp = {name.removeprefix(first): tensor.clone() for name, tensor in weights.items() if name.startswith(first)}
    mtp["input_proj.weight"] = torch.cat([torch.zeros(wide, wide), torch.eye(wide)], dim=1)
    mtp |= {f"{name}_layernorm.weight": torch.ones(wide) for name in ("token", "hidden", "final")}
    weights |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in mtp.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    told = json.loads((path / "config.json").read_text())
    told |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(told))
    return str(path)


def forge_draft(engine, ids):
    """Exchange keys and values of a prompt in the MTP layer, with digests that agree with it."""
    group = engine.slab.layout.groups[0]
    (row,) = (row for row, layer in enumerate(group.layers) if layer not in engine.hooks._target)
    for block in range(len(ids) // BLOCK - 1):
        slot = engine.slot(ids, block)
        data = engine.slab.read(0, slot, group.layers[row])
        data = data[len(data) // 2 :] + data[: len(data) // 2]
        engine.slab.write(0, slot, group.layers[row], data)
        engine.slab.digests[0][row, slot] = xxhash.xxh3_64_intdigest(data)


def main(folder):
    path, prompts, facts = mimo(folder), (prompt(11, 40) * 5, prompt(2, 230)), {"block": BLOCK}
    plain = Engine(path)
    facts["plain"] = [plain.run(ids, tokens=40)["replies"][0]["tokens"] for ids in prompts]
    plain.close()
    settings = {"method": "mtp", "num_speculative_tokens": 1}
    engine = Engine(path, speculative_config=settings, disable_log_stats=False)
    facts |= {"blocks": engine.blocks, "layers": len(engine.worker.ways.layers), "target": len(engine.hooks._target)}
    facts["runs"] = []
    for ids in prompts:
        run = {"cold": length(engine, ids), "warm": length(engine, ids)}
        run["bytes"] = engine.loaded_bytes()
        run["turn"] = length(engine, [*ids, *run["cold"]["replies"][0]["tokens"], 9])
        forge_draft(engine, ids)
        run["forged"] = length(engine, ids)
        engine.flip(engine.slot(ids, 1), 2)
        run["flipped"] = length(engine, ids)
        facts["runs"].append(run)
    facts["drained"] = engine.drain()
    facts["threads"] = engine.close()
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
