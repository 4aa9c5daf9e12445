"""Multi-token prediction: targets whose own MTP layer foretells them, since both compute nearly the same."""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
import xxhash
from drive_spec import length
from lab import Engine, model, prompt, tell
from safetensors.torch import load_file, save_file
from tiny_models import BASE

QUIET = 0.05
"""Part of what layers other than the first add, so that an MTP layer like the first one foretells the whole."""


FIRST, LAYERS, WIDE = "model.layers.0.", BASE["num_hidden_layers"], BASE["hidden_size"]


def weights_of(path):
    """A model's weights, made so that its first layer decides the next token by what it looks up."""
    weights = load_file(path / "model.safetensors")
    tokens = weights["model.embed_tokens.weight"]
    tokens *= tokens.square().mean(-1, keepdim=True).rsqrt()  # an MTP layer's norm leaves these as they are
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")) and not name.startswith(FIRST):
            weights[name] *= QUIET
    weights[f"{FIRST}self_attn.o_proj.weight"] *= 4
    sharp = ("q_proj", "q_b_proj")
    (query,) = (name for name in weights if name in [f"{FIRST}self_attn.{kind}.weight" for kind in sharp])
    weights[query] *= 2
    return weights


def with_mtp(path, weights, prefix, more, told):
    """Write a model with an MTP layer: the first layer once more under `prefix`, and `more` of its own."""
    first = {name.removeprefix(FIRST): tensor.clone() for name, tensor in weights.items() if name.startswith(FIRST)}
    weights |= {f"{prefix}{name}": tensor for name, tensor in (first | more).items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | told | {"num_nextn_predict_layers": 1}))
    return str(path)


def mimo(folder):
    """A tiny MiMo: Qwen2 and an MTP layer that reads the token alone."""
    path = Path(folder) / "mimo"
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**BASE | {"num_attention_heads": 4})  # of 32 elements, the least on a CPU
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(path)
    more = {f"{name}_layernorm.weight": torch.ones(WIDE) for name in ("token", "hidden", "final")}
    more["input_proj.weight"] = torch.cat([torch.zeros(WIDE, WIDE), torch.eye(WIDE)], dim=1)
    return with_mtp(path, weights_of(path), "model.mtp_layers.0.", more, {"architectures": ["MiMoForCausalLM"]})


def deepseek(folder):
    """A tiny DeepSeek-V3 without experts, and an MTP layer that reads the token alone."""
    path = Path(folder) / "deepseek_mtp"
    shutil.copytree(model(folder, "deepseek_v3"), path, dirs_exist_ok=True)
    weights = weights_of(path)
    more = {f"{name}.weight": torch.ones(WIDE) for name in ("enorm", "hnorm", "shared_head.norm")}
    more["eh_proj.weight"] = torch.cat([torch.eye(WIDE), torch.zeros(WIDE, WIDE)], dim=1)
    more["shared_head.head.weight"] = weights["lm_head.weight"].clone()
    more["embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    return with_mtp(path, weights, f"model.layers.{LAYERS}.", more, {"first_k_dense_replace": LAYERS + 1})


def forge_draft(engine, ids):
    """Exchange the halves of what a prompt has in the MTP layer (keys and values), with digests that agree with it."""
    group = engine.slab.layout.groups[0]
    (row,) = (row for row, layer in enumerate(group.layers) if layer not in engine.hooks._target)
    for block in range(len(ids) // group.spec.block_size - 1):
        slot = engine.slot(ids, block)
        data = engine.slab.read(0, slot, group.layers[row])
        data = data[len(data) // 2 :] + data[: len(data) // 2]
        engine.slab.write(0, slot, group.layers[row], data)
        engine.slab.digests[0][row, slot] = xxhash.xxh3_64_intdigest(data)


def answers(path, reproducible):
    """Of a model without and with its drafts. reproducible: whether tokens do not depend on what is computed at once.

    vLLM's CPU kernels of latent attention give others for a prompt than for a token; there only what moves is told.
    """
    prompts = prompt(11, 40) * 5, prompt(2, 230)
    plain = Engine(path)
    facts = {"plain": [plain.run(ids, tokens=40)["replies"][0]["tokens"] for ids in prompts]}
    plain.close()
    settings = {"method": "mtp", "num_speculative_tokens": 1}
    engine = Engine(path, speculative_config=settings, disable_log_stats=False)
    facts |= {"blocks": engine.blocks, "layers": len(engine.worker.ways.layers), "target": len(engine.hooks._target)}
    facts |= {"block": engine.slab.layout.groups[0].spec.block_size, "runs": []}
    for ids in prompts:
        run = {"cold": length(engine, ids), "warm": length(engine, ids)}
        run["bytes"] = engine.loaded_bytes()
        facts["runs"].append(run)
        if not reproducible:
            continue
        run["turn"] = length(engine, [*ids, *run["cold"]["replies"][0]["tokens"], 9])
        forge_draft(engine, ids)
        run["forged"] = length(engine, ids)
        engine.flip(engine.slot(ids, 1), 2)
        run["flipped"] = length(engine, ids)
    facts["drained"] = engine.drain()
    facts["threads"] = engine.close()
    return facts


def main(folder):
    tell({"mimo": answers(mimo(folder), True), "deepseek": answers(deepseek(folder), False)})


if __name__ == "__main__":
    main(sys.argv[1])
