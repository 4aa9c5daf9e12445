"""Whether KV comes back as it was saved, in real vLLM, for each family of attention: bytes, and tokens.

    python bench/families_vllm_gpu.py --json families.json [--families llama mla ...] [--cpu]

Small models with seeded random weights (their config.json is written here), each an engine in a process of its own, and
some at work at a time. For each: a prompt is computed and saved, answered twice from GPU memory, everything in GPU
memory is forgotten and changed, and it is answered from the pool. The JSON is written after every family; one that
fails says why there, and the others go on. LFM2 ties its embeddings: with random weights it repeats the prompt's last
token, so there the bytes count alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Timer

from bench_vllm_gpu import Engine, Results, layercast

HOST_BYTES = 1 << 30
BASE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 128,
    "sliding_window": 512,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
MODELS = {
    "llama": LLAMA,
    "moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gemma3": GEMMA,
    "mla": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 8,
        "head_dim": 64,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 4,
        "n_group": 2,
        "topk_group": 1,
    },
    "granite4": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_local_experts": 0,
        "shared_intermediate_size": 1024,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "position_embedding_type": "nope",
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 0.0884,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
    },
    "lfm2": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "tie_embedding": False,
        "conv_L_cache": 3,
        "conv_dim": 1024,
        "conv_dim_out": 1024,
        "block_dim": 1024,
        "block_ff_dim": 2048,
        "block_use_swiglu": True,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    },
}
STATES = {"block_size": None, "engine": {"mamba_cache_mode": "align"}, "lift": True}
FAMILIES = {
    "llama": {"model": "llama"},
    "llama, block-major": {
        "model": "llama",
        "pool": {"use_layerwise": False},
        "env": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    },
    "mixture of experts": {"model": "moe"},
    "latent": {"model": "mla", "block_size": None},
    "windows": {"model": "gemma3", "lift": True},
    "recurrent": {"model": "granite4", **STATES},
    "recurrent, convolutions": {"model": "lfm2", **STATES},
}
"""lift: run it even where the connector refuses it in vLLM's version; the refusal is in the facts."""
SHARED = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "max_num_seqs": 8, "gpu_memory_utilization": 0.05}
ON_GPU = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
}
ON_CPU = {"dtype": "float32", "enforce_eager": True}


class Family(Engine):
    """A family's process."""

    def __init__(self, name, args, folder):
        family = FAMILIES[name]
        model = Path(folder) / family["model"]
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({**BASE, **MODELS[family["model"]]}))
        block = {"block_size": 32 if args.cpu else 16, **{key: family[key] for key in ("block_size",) if key in family}}
        case = {
            "model": str(model),
            "kv": layercast(kv_recompute_threshold=0, **{"host_bytes": HOST_BYTES, **family.get("pool", {})}),
            "kv_bytes": (256 if args.cpu else 1024) << 20,
            "engine": {
                **SHARED,
                **(ON_CPU if args.cpu else ON_GPU),
                **block,
                **family.get("engine", {}),
                **json.loads(args.engine),
            },
            "layercast": True,
            "moves": True,
            "lift": family.get("lift", False),
        }
        log = Path(args.logs) / f"family-{name.replace(' ', '-').replace(',', '')}.log"
        self._start(name, log, family.get("env", {}), case)

    def prove(self, args, results, lock):
        """Everything that is asked of it, within its time."""
        timer = Timer(args.limit, self.process.kill)
        timer.start()
        try:
            self.begin()
            order = {"prefix": args.prefix, "new": args.new, "tokens": args.tokens, "count": args.count}
            facts, found = self.up(), self("moved", **order)
            with lock:
                results.put("families", self.name, {**facts, **found, **verdict(found["runs"])})
            self.end()
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            with lock:
                results.put("failed", self.name, f"{type(error).__name__}\n{self.end_of_log()}")
            self.process.kill()
        finally:
            timer.cancel()

    def end_of_log(self):
        """What it has said last."""
        return "\n".join(line for line in self.log.read_text().splitlines()[-40:] if "it/s" not in line)[-4000:]


def verdict(runs):
    """What the runs prove, in short."""
    return {
        "bytes_equal": all(group["equal"] and group["blocks"] for run in runs for group in run["bytes"]),
        "reproducible": all(run["reproducible"] for run in runs),
        "tokens_equal": all(run["tokens_equal"] for run in runs),
        "same_hits": all(len(set(run["cached"])) == 1 and run["cached"][0] for run in runs),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--logs", default="/tmp")
    parser.add_argument("--cpu", action="store_true", help="a CPU's settings: no graphs, float32")
    parser.add_argument("--engine", default="{}", help="further arguments of every LLM, as JSON")
    parser.add_argument("--at-once", type=int, default=4, help="engines at work at a time; all import together")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a family may take")
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--new", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--count", type=int, default=2)
    args = parser.parse_args()
    results, lock = Results(args.json, 1e9), Lock()
    results.put("about", "command", " ".join(sys.argv[1:]))
    with tempfile.TemporaryDirectory() as folder:
        if args.at_once >= 2:
            engines = [Family(name, args, folder) for name in args.families]
            with ThreadPoolExecutor(args.at_once) as pool:
                list(pool.map(lambda engine: engine.prove(args, results, lock), engines))
        else:
            for name in args.families:
                Family(name, args, folder).prove(args, results, lock)
    for name, found in results.all.get("families", {}).items():
        sys.stdout.write(f"{name}: {', '.join(key for key in verdict(found['runs']) if found[key])}\n")
    good = [all(verdict(found["runs"]).values()) for found in results.all.get("families", {}).values()]
    sys.exit("failed" in results.all or not all(good))


if __name__ == "__main__":
    main()
