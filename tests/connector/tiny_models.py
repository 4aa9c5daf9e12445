"""Tiny seeded models of every family, random weights, on the CPU.

Hidden size 128, 4 to 6 layers, vocabulary 512, weights drawn wide (0.1) so that greedy answers vary.
"""

import torch
import transformers

BASE = {
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
MAMBA2 = {
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 48,
}
GRANITE4 = MAMBA2 | {
    **LOCAL_EXPERTS,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "shared_intermediate_size": 64,
    "position_embedding_type": "nope",
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 0.25,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "sliding_window": 32,
            "query_pre_attn_scalar": 16,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "qk_nope_head_dim": 16,
        },
    ),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "sliding_window": 32, **LOCAL_EXPERTS}),
    "granite4": ("GraniteMoeHybridConfig", GRANITE4),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **EXPERTS,
            "head_dim": 16,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
    "falcon_h1": ("FalconH1Config", MAMBA2 | {"mamba_n_heads": 8, "head_dim": 16, "mamba_d_ssm": 128}),
    "bamba": ("BambaConfig", MAMBA2 | {"attn_layer_indices": [2]}),
    "jamba": (
        "JambaConfig",
        {
            **EXPERTS,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
}
"""Name to transformers' config and what differs from BASE. Jamba is here to be refused: its layers are Mamba-1."""


def seeded(config, more, dtype=torch.float32, seed=0):
    """A causal language model of a config of transformers'; the same weights for the same seed and dtype."""
    torch.manual_seed(seed)
    made = getattr(transformers, config)(**BASE | more)
    return transformers.AutoModelForCausalLM.from_config(made, dtype=dtype).eval()


def tiny_model(family, dtype=torch.float32, seed=0):
    """One of FAMILIES, to infer with."""
    model = seeded(*FAMILIES[family], dtype, seed)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.zero_()  # left uninitialised by transformers
    return model.requires_grad_(False)
