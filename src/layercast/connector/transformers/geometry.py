"""What a Hugging Face model caches in each layer, learned from one tiny forward, and the groups that follow.

Layer kinds are those that transformers itself chooses (`DynamicCache(config=...)`); shapes and dtypes are read from the
tensors of a two-token forward, never worked out from the config. Does not know blocks, requests or steps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import signature
from math import prod
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from layercast.errors import UnsupportedModel
from layercast.spec.groups import GroupKind, GroupSpec
from layercast.spec.planes import PlaneKind

AnyLayer: TypeAlias = CacheLayerMixin | LinearAttentionCacheLayerMixin

HANDLED = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
REASONS = {
    "DynamicIndexedLayer": "it also keeps indexer keys (sparse attention), which are not paged yet",
    "DummyLayer": "it reads the KV of another layer, so it has no cache of its own to gate",
}


@dataclass(frozen=True, slots=True)
class Content:
    """One tensor that is kept: of one token, of one block, or (a recurrent state) of one snapshot."""

    kind: PlaneKind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """What one mixer of a layer keeps, and the kind of group that this belongs to.

    id: the layer's id in layouts and steps. contents: of attention, keys and values of one token, `[heads, width]` each
    (MLA: the compressed latent and its rotary part); of a recurrent layer, the conv state and, unless it is a short
    conv, the recurrent one. window: tokens a query sees (itself included), or None.
    """

    id: int
    kind: GroupKind
    contents: tuple[Content, ...]
    device: torch.device
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer of the model: what it caches, if anything. A hybrid layer has both parts."""

    attention: Part | None = None
    state: Part | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """All layers, in the model's order. Part ids ascend in the order in which a forward reaches them."""

    layers: tuple[LayerGeometry, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """What all layers keep, recurrent states last."""
        attention = (layer.attention for layer in self.layers if layer.attention)
        return (*attention, *(layer.state for layer in self.layers if layer.state))

    def specs(self, block_size: int, state_block: int) -> tuple[GroupSpec, ...]:
        """The groups: full, latent, one for each window, recurrent. `state_block`: tokens between two snapshots."""
        members: dict[tuple[GroupKind, int | None], list[int]] = {}
        for part in self.parts:
            members.setdefault((part.kind, part.window), []).append(part.id)
        return tuple(
            GroupSpec(
                name=kind.value if window is None else f"{kind.value}-{window}",
                kind=kind,
                block_size=state_block if kind is GroupKind.RECURRENT else block_size,
                layers=tuple(layers),
                window=window,
            )
            for (kind, window), layers in members.items()
        )


def read_geometry(model: PreTrainedModel) -> Geometry:
    """The geometry of a causal language model (a two-token forward is run on it).

    Raises UnsupportedModel, with the reason, for a model that keeps state which can't be continued from blocks.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    _refuse(name, model, config)
    cache = DynamicCache(config=model.config)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.no_grad():
        positions = torch.arange(2, device=model.device)[None]
        model(input_ids=tokens, position_ids=positions, use_cache=True, **{cache_argument(model): cache})
    latent = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
    ids = iter(range(2 * len(cache.layers)))
    geometry = Geometry(tuple(_layer(name, index, layer, latent, ids) for index, layer in enumerate(cache.layers)))
    if not any(layer.attention for layer in geometry.layers):
        raise UnsupportedModel(f"{name}: it has no attention layer, and the engine counts tokens by those")
    return geometry


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes its cache; transformers 5.20 and later have renamed it."""
    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


def _refuse(name: str, model: PreTrainedModel, config: PreTrainedConfig) -> None:
    if any(parameter.squeeze().ndim > 1 for key, parameter in model.named_parameters() if key.endswith("A_log")):
        raise UnsupportedModel(
            f"{name}: its Mamba-1 layers ignore the recurrent state in a forward of several tokens that continues from "
            "one (the selective scan takes no initial state), so a cached prefix would give wrong text; "
            "use a Mamba-2 or attention model"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name}: its last layers read the KV of other layers, which have no gate of their own")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedModel(f"{name}: chunked attention is not a window, and its blocks are not handled yet")


def _layer(name: str, index: int, layer: AnyLayer, latent: tuple[Any, Any], ids: Iterator[int]) -> LayerGeometry:
    kind = type(layer).__name__
    if kind not in HANDLED:
        reason = REASONS.get(kind, "its kind of cache is not known here")
        raise UnsupportedModel(f"{name}, layer {index} ({kind}): {reason}")
    # A hybrid layer's forward reads its state before it updates its rows, so the state's id comes first.
    state = _state(name, index, layer, ids) if isinstance(layer, LinearAttentionCacheLayerMixin) else None
    attention = _attention(name, index, layer, latent, ids) if isinstance(layer, CacheLayerMixin) else None
    return LayerGeometry(attention, state)


def _attention(name: str, index: int, layer: CacheLayerMixin, latent: tuple[Any, Any], ids: Iterator[int]) -> Part:
    keys, values = layer.keys, layer.values
    if keys is None or keys.ndim != 4 or values.shape[:3] != keys.shape[:3]:
        raise UnsupportedModel(f"{name}, layer {index}: a forward left no keys and values of the usual shape in it")
    is_latent = keys.shape[1] == 1 and (keys.shape[3], values.shape[3]) == latent
    kind, window = GroupKind.LATENT if is_latent else GroupKind.FULL, getattr(layer, "sliding_window", None)
    names = (PlaneKind.LATENT, PlaneKind.ROPE) if is_latent else (PlaneKind.KEY, PlaneKind.VALUE)
    contents = [
        Content(name, (rows.shape[1], rows.shape[3]), rows.dtype)
        for name, rows in zip(names, (keys, values), strict=True)
    ]
    return Part(next(ids), kind if window is None else GroupKind.WINDOW, tuple(contents), keys.device, window)


def _state(name: str, index: int, layer: LinearAttentionCacheLayerMixin, ids: Iterator[int]) -> Part | None:
    if _all_none(layer.conv_states.values()) and _all_none(layer.recurrent_states.values()):
        return None  # a placeholder of a layer without any mixer
    if layer.number_of_states != 1 or layer.conv_states[0] is None:
        raise UnsupportedModel(
            f"{name}, layer {index}: it keeps {layer.number_of_states} states; one conv state is handled"
        )
    kept = {PlaneKind.CONV: layer.conv_states[0], PlaneKind.STATE: layer.recurrent_states[0]}
    contents = [Content(kind, tuple(state.shape[1:]), state.dtype) for kind, state in kept.items() if state is not None]
    return Part(next(ids), GroupKind.RECURRENT, tuple(contents), layer.conv_states[0].device)


def _all_none(values: Iterable[object]) -> bool:
    return all(value is None for value in values)
