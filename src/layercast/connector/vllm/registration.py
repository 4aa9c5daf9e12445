"""What vLLM registers, as layercast's groups, planes and identities; and what is refused, with the reason.

Layers get ids in the order of registration. Blocks are moved whole: only backends named here are known to keep a
token's content in one row of the registered `[blocks, heads, tokens, content]`; the rest may pack it as they like.
Does not know requests or steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm import __version__ as VERSION
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from layercast.connector.vllm import versions
from layercast.connector.vllm.weights import weights_digest
from layercast.errors import BadPlane, UnsupportedModel
from layercast.spec.groups import GroupKind, GroupSpec, Layout, layout_of
from layercast.spec.identities import identities_of
from layercast.spec.keys import Identity
from layercast.spec.planes import BLOCK, HEAD, TOKEN, Plane, PlaneKind, plane_of_tensor

KINDS: dict[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: GroupKind.FULL,
    MLAAttentionSpec: GroupKind.LATENT,
    SlidingWindowSpec: GroupKind.WINDOW,
    MambaSpec: GroupKind.RECURRENT,
}
PLANES = {GroupKind.LATENT: PlaneKind.LATENT, GroupKind.RECURRENT: PlaneKind.STATE}
TOKEN_ROWS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_MLA"}


@dataclass(frozen=True, slots=True)
class Registration:
    """One rank's memory: layer ids by vLLM's layer names, its layout, one identity a group.

    target: layers of the model itself, not of a draft that runs after it.
    """

    layers: Mapping[str, int]
    target: frozenset[int]
    layout: Layout
    identities: tuple[Identity, ...]


def refuse(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Raise UnsupportedModel, with the reason, for what this connector would not do right."""
    parallel, specs = config.parallel_config, [spec for group in caches.kv_cache_groups for spec in _specs(group)]
    strange = sorted({type(spec).__name__ for spec in specs if type(spec) not in KINDS})
    recurrent = any(isinstance(spec, MambaSpec) for spec in specs)
    aligned = config.cache_config.enable_prefix_caching and config.cache_config.mamba_cache_mode == "align"
    divergent = versions.RESTORES_DEEPER_STATES
    windows = any(isinstance(spec, SlidingWindowSpec) for spec in specs)
    several = len(caches.kv_cache_groups) > 1
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1,
        f"caches of {', '.join(strange)}": bool(strange),
        "caches that vLLM keeps out of transfers": versions.transferred_groups(caches) != len(caches.kv_cache_groups),
        "recurrent layers without their states at block boundaries; set --enable-prefix-caching "
        "--mamba-cache-mode align": recurrent and divergent and not aligned,
        "recurrent layers beside vLLM's own prefix cache in this version; set --no-enable-prefix-caching, or use "
        "vLLM 0.32": recurrent and not divergent and config.cache_config.enable_prefix_caching,
        "layers with a sliding window or a recurrent state in this version, which does not tell whole block tables; "
        "use vLLM 0.29": (windows or recurrent) and not versions.TELLS_TABLES,
        "several cache groups in this version, which can't be told of a load that failed; use vLLM 0.30": several
        and not versions.TELLS_FAILED_REQUESTS,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise UnsupportedModel(f"layercast's vLLM connector does not handle {'; '.join(found)}")


def register(
    config: VllmConfig, caches: KVCacheConfig, tensors: Mapping[str, torch.Tensor], lasting: bool
) -> Registration:
    """Layers, layout and identities of the tensors that vLLM registers. Raises BadPlane and what `layout_of` raises.

    lasting: whether KV outlives this process, so that weights are named by content, and all that may change what a
    kernel writes by its version. Raises UnsupportedModel where that can't be done.
    """
    layers = {name: index for index, name in enumerate(tensors)}
    specs = [_group(index, group, layers) for index, group in enumerate(caches.kv_cache_groups)]
    planes, kernels = [], []
    for group in caches.kv_cache_groups:
        for name, spec in zip(group.layer_names, _specs(group), strict=True):
            module = config.compilation_config.static_forward_context[name]
            backend = module.get_attn_backend().get_name()
            kernels.append(_kernel(module, backend, spec))
            planes.append(_plane(name, layers[name], tensors[name], backend, KINDS[type(spec)], caches.num_blocks))
    layout = layout_of(specs, planes)
    model = config.model_config
    name, revision = _lasting_names(config) if lasting else (model.model, model.revision or "")
    identities = identities_of(
        layout,
        model=name,
        revision=revision,
        weights_version=f"{model.dtype} {model.quantization}",
        draft=_draft(config, named=not lasting),
        packing=f"{sorted(set(kernels))} {versions.layout_name(config, caches)} {config.cache_config.cache_dtype}",
    )
    target = frozenset(layer for name, layer in layers.items() if not _is_draft(config, name))
    return Registration(layers, target, layout, identities)


def _lasting_names(config: VllmConfig) -> tuple[str, str]:
    """What names the weights, a draft's too, wherever they lie, and what computes with them.

    Some models scale positions, or attention, by the longest context they are started for.
    """
    if getattr(config.cache_config, "calculate_kv_scales", False):  # a setting of older versions
        raise UnsupportedModel(
            "calculate_kv_scales: KV scaled by the first prompt is no other process's; unset disk_path"
        )
    return weights_digest(config), f"vllm {VERSION} for {config.model_config.max_model_len} tokens"


def _is_draft(config: VllmConfig, name: str) -> bool:
    """Whether a layer belongs to a draft: by its prefix, or numbered behind the model's own layers."""
    if config.speculative_config is None:
        return False
    own = config.model_config.get_total_num_hidden_layers()
    return name.startswith("draft_model.") or extract_layer_index(name) >= own


def _draft(config: VllmConfig, named: bool) -> str:
    """What decides the KV of draft layers besides the model itself; empty without any. named: say which weights."""
    spec = config.speculative_config
    if spec is None or spec.draft_model_config is None:
        return ""
    draft = spec.draft_model_config
    name = f"{draft.model} {draft.revision} " if named else ""
    return f"{spec.method} {name}{draft.dtype} {draft.quantization}"


def _specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """The spec of each of the group's layers."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [group.kv_cache_spec if each is None else each[name] for name in group.layer_names]


def _group(index: int, group: KVCacheGroupSpec, layers: Mapping[str, int]) -> GroupSpec:
    spec = _specs(group)[0]
    return GroupSpec(
        name=f"group-{index}",
        kind=KINDS[type(spec)],
        block_size=group.kv_cache_spec.block_size,
        layers=tuple(layers[name] for name in group.layer_names),
        window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
    )


def _kernel(module: object, backend: str, spec: KVCacheSpec) -> str:
    """What orders the content of a layer's blocks, as far as strides do not tell."""
    if isinstance(spec, MambaSpec):
        return f"{backend} {spec.mamba_type} {spec.shapes} {spec.dtypes}"
    return f"{backend} {getattr(module, 'isa', '')}"


def _plane(name: str, layer: int, tensor: torch.Tensor, backend: str, kind: GroupKind, blocks: int) -> Plane:
    """One layer's registered tensor: [blocks, heads, tokens, content], or as many kernel blocks in each block."""
    if tensor.ndim == 3:  # one head, in older versions
        tensor = tensor.unsqueeze(1)
    if tensor.ndim != 4 or tensor.shape[0] % blocks:
        raise BadPlane(
            f"{name}: registered as {tuple(tensor.shape)}, but [{blocks} blocks, heads, tokens, content] is what is "
            "understood; use vLLM 0.26 or later"
        )
    axes = [BLOCK, HEAD, TOKEN if backend in TOKEN_ROWS else "packed", "content"]
    if tensor.shape[0] != blocks:
        tensor, axes = tensor.unflatten(0, (blocks, -1)), [BLOCK, "kernel", HEAD, "packed", "content"]
    if kind is GroupKind.RECURRENT:
        axes = [BLOCK, "one", "state", "content"]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return plane_of_tensor(
        name, layer, PLANES.get(kind, PlaneKind.KV), dtype, tensor.data_ptr(), tensor.shape, tensor.stride(), axes
    )
