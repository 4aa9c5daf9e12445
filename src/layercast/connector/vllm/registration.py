"""What vLLM registers, as layercast's groups, planes and identities; and what is refused, with the reason.

Layers get ids in the order of registration. Blocks are moved whole: only backends named here are known to keep a
token's content in one row of the registered `[blocks, heads, tokens, content]`; the rest may pack it as they like.
Does not know requests or steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from layercast.errors import BadPlane, UnsupportedModel
from layercast.spec.groups import GroupKind, GroupSpec, Layout, layout_of
from layercast.spec.identities import identities_of
from layercast.spec.keys import Identity
from layercast.spec.planes import BLOCK, HEAD, TOKEN, Plane, PlaneKind, plane_of_tensor

KINDS = {FullAttentionSpec: GroupKind.FULL, MLAAttentionSpec: GroupKind.LATENT}
TOKEN_ROWS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_MLA"}


@dataclass(frozen=True, slots=True)
class Registration:
    """One rank's memory: layer ids by vLLM's layer names, its layout, one identity a group."""

    layers: Mapping[str, int]
    layout: Layout
    identities: tuple[Identity, ...]


def refuse(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Raise UnsupportedModel, with the reason, for what this connector would not do right."""
    parallel, groups = config.parallel_config, caches.kv_cache_groups
    reasons = {
        "speculative decoding (it reports a step before its draft layers have run)": bool(config.speculative_config),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1,
        "a kv_role other than kv_both": config.kv_transfer_config.kv_role != "kv_both",
        f"{len(groups)} cache groups (vLLM can't recompute a failed load of several)": len(groups) != 1,
        "a cache other than full or latent attention": any(type(g.kv_cache_spec) not in KINDS for g in groups),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise UnsupportedModel(f"layercast's vLLM connector does not handle {'; '.join(found)}")


def register(config: VllmConfig, caches: KVCacheConfig, tensors: Mapping[str, torch.Tensor]) -> Registration:
    """Layers, layout and identities of the tensors that vLLM registers. Raises BadPlane and what `layout_of` raises."""
    layers = {name: index for index, name in enumerate(tensors)}
    modules = {name: config.compilation_config.static_forward_context[name] for name in tensors}
    backends = {name: module.get_attn_backend().get_name() for name, module in modules.items()}
    specs = [
        GroupSpec(
            name=f"group-{index}",
            kind=KINDS[type(group.kv_cache_spec)],
            block_size=group.kv_cache_spec.block_size,
            layers=tuple(layers[name] for name in group.layer_names),
        )
        for index, group in enumerate(caches.kv_cache_groups)
    ]
    planes = [_plane(name, layers[name], tensor, backends[name], caches) for name, tensor in tensors.items()]
    layout = layout_of(specs, planes)
    kernels = {f"{backends[name]} {getattr(module, 'isa', '')}" for name, module in modules.items()}
    model = config.model_config
    identities = identities_of(
        layout,
        model=model.model,
        revision=model.revision or "",
        weights_version=f"{model.dtype} {model.quantization}",
        packing=f"{sorted(kernels)} {caches.kv_cache_layout} {config.cache_config.cache_dtype}",
    )
    return Registration(layers, layout, identities)


def _plane(name: str, layer: int, tensor: torch.Tensor, backend: str, caches: KVCacheConfig) -> Plane:
    if tensor.ndim != 4 or tensor.shape[0] != caches.num_blocks:
        raise BadPlane(
            f"{name}: registered as {tuple(tensor.shape)}, but [{caches.num_blocks} blocks, heads, tokens, content] is "
            "what is understood; use vLLM 0.30 or later, and a block size that the backend's kernels take as it is"
        )
    axes = (BLOCK, HEAD, TOKEN if backend in TOKEN_ROWS else "packed", "content")
    latent = isinstance(next(iter(caches.kv_cache_groups)).kv_cache_spec, MLAAttentionSpec)
    kind = PlaneKind.LATENT if latent else PlaneKind.KV
    dtype = str(tensor.dtype).removeprefix("torch.")
    return plane_of_tensor(name, layer, kind, dtype, tensor.data_ptr(), tensor.shape, tensor.stride(), axes)
