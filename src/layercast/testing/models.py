"""Tiny seeded models of every family, random weights, on the CPU.

Hidden size 128, 4 to 6 layers, vocabulary 512, weights drawn wide (0.1) so that greedy answers vary.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
}


def _gemma3() -> PreTrainedConfig:
    base = BASE | {"num_hidden_layers": 6}
    return transformers.Gemma3TextConfig(
        **base,
        head_dim=16,
        sliding_window=32,
        query_pre_attn_scalar=16,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
    )


def _deepseek_v3() -> PreTrainedConfig:
    base = BASE | {"num_key_value_heads": 8}
    return transformers.DeepseekV3Config(
        **base,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        v_head_dim=16,
        qk_nope_head_dim=16,
    )


def _granite4() -> PreTrainedConfig:
    return transformers.GraniteMoeHybridConfig(
        **BASE,
        **MAMBA2,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        position_embedding_type="nope",
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        attention_multiplier=0.25,
    )


def _qwen3_next() -> PreTrainedConfig:
    return transformers.Qwen3NextConfig(
        **BASE,
        head_dim=16,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_value_heads=8,
        linear_num_key_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
    )


def _falcon_h1() -> PreTrainedConfig:
    mamba = MAMBA2 | {"mamba_n_heads": 8}
    return transformers.FalconH1Config(**BASE, **mamba, head_dim=16, mamba_d_ssm=128)


def _jamba() -> PreTrainedConfig:
    return transformers.JambaConfig(
        **BASE,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=16),
    "gemma3": _gemma3,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": lambda: transformers.GptOssConfig(
        **BASE, head_dim=16, sliding_window=32, num_local_experts=4, num_experts_per_tok=2
    ),
    "granite4": _granite4,
    "qwen3_next": _qwen3_next,
    "falcon_h1": _falcon_h1,
    "bamba": lambda: transformers.BambaConfig(**BASE, **MAMBA2, attn_layer_indices=[2]),
    "jamba": _jamba,
}
"""Family name to config. Jamba is here to be refused: its layers are Mamba-1."""


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A causal language model of that family in evaluation mode; the same weights for the same seed and dtype."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=dtype).eval()
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.zero_()  # left uninitialised by transformers
    return model.requires_grad_(False)
