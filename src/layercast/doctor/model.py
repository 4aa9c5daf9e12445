"""What a model's config.json says of its KV: kinds of layers, bytes a token, bytes a state.

Reads a local folder or the Hugging Face cache, never the network; of weights their sizes alone; no engine. Sizes of KV
are those of one rank that holds all heads. Does not know vLLM.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from layercast.errors import BadSetting, Missing
from layercast.spec.dtypes import item_bytes
from layercast.spec.groups import GroupKind

FULL, WINDOW, LATENT, RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.LATENT, GroupKind.RECURRENT
KINDS: Mapping[str, tuple[GroupKind, ...]] = {
    "full_attention": (FULL,),
    "attention": (FULL,),
    "indexed_attention": (FULL,),
    "*": (FULL,),
    "sliding_attention": (WINDOW,),
    "linear_attention": (RECURRENT,),
    "mamba": (RECURRENT,),
    "conv": (RECURRENT,),
    "M": (RECURRENT,),
    "hybrid": (FULL, RECURRENT),
    "mlp": (),
    "moe": (),
    "-": (),
    "E": (),
}
"""What configs call a layer, to the caches it has."""
WHOLE = {"mamba": "mamba", "mamba2": "mamba", "falcon_mamba": "mamba", "falcon_h1": "hybrid"}
"""Types of models all of whose layers are alike, and do not say so."""
WEIGHTS = ("model*.safetensors", "*.safetensors", "*.bin", "*.gguf")
"""Files of weights, the first kind that is there; some models have the same ones again under another name."""
FIRST_MAMBAS = ("mamba", "falcon_mamba", "jamba", "zamba")
"""Types of models whose recurrent layers are Mamba-1's."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model's KV. layers: how many of each kind. token_bytes: of one token in one attention layer.

    state_bytes: of one snapshot in one recurrent layer, 0 where it can't be told. longest: tokens that the model was
    made for, 0 where it does not tell. unknown: names of layers that nothing here knows. drafts: layers of its own that
    predict further tokens. sparse: attention that picks its tokens by an index of their own. first_mamba: whether the
    recurrent layers are Mamba-1's.
    """

    architecture: str
    dtype: str
    layers: Mapping[GroupKind, int]
    token_bytes: int
    state_bytes: int
    longest: int
    unknown: tuple[str, ...] = ()
    drafts: int = 0
    sparse: bool = False
    first_mamba: bool = False
    encoder_decoder: bool = False

    @property
    def attention_layers(self) -> int:
        """Layers whose KV grows by a row a token."""
        return sum(count for kind, count in self.layers.items() if kind is not RECURRENT)

    @property
    def recurrent_layers(self) -> int:
        """Layers that keep a state."""
        return self.layers.get(RECURRENT, 0)


def config_of(model: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The config of a folder, of a config.json, or of a name that the Hugging Face cache holds.

    Raises Missing with where it was looked for, BadSetting for what is no config.
    """
    return _object(_config_path(model, environ))


def weight_bytes(model: str, environ: Mapping[str, str]) -> int | None:
    """Bytes of a model's weights, which lie beside its config: as their index tells, else of the files; None: no files.

    Raises what `config_of` raises.
    """
    config = _config_path(model, environ)
    for index in config.parent.glob("*.index.json"):
        if isinstance(total := _object(index).get("metadata", {}).get("total_size"), int):
            return total
    sizes = [sum(path.stat().st_size for path in config.parent.glob(pattern)) for pattern in WEIGHTS]
    return next(filter(None, sizes), None)


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises BadSetting."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadSetting(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise BadSetting(f"{path}: should be a JSON object")
    return found


def _config_path(model: str, environ: Mapping[str, str]) -> Path:
    if not model:
        raise Missing("--vllm names no model: give a folder with a config.json, or a name that was downloaded")
    local = Path(model)
    if local.is_file():
        return local
    if (local / "config.json").is_file():
        return local / "config.json"
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    snapshots = (hub / f"models--{model.replace('/', '--')}").glob("snapshots/*/config.json")
    newest = max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise Missing(f"{model}: neither a folder with a config.json nor in {hub}; download it first, or name a folder")
    return newest


def model_of(config: Mapping[str, Any]) -> Model:
    """A model's KV, from its config. Raises BadSetting where the config does not tell even the number of layers."""
    text = {**config, **(config.get("text_config") or config.get("llm_config") or {})}
    names = _names(text)
    if not names:
        raise BadSetting("the config names no number of layers (num_hidden_layers): is it a language model's?")
    kinds = Counter(kind for name in names for kind in KINDS.get(name, ()))
    if text.get("kv_lora_rank"):
        kinds[LATENT] = kinds.pop(FULL, 0)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32")
    dtype = "bfloat16" if dtype == "float32" else dtype  # engines that are left to choose take the shorter one
    item = item_bytes(dtype, "the config")
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    return Model(
        architecture=str(architectures[0]),
        dtype=dtype,
        layers={kind: number for kind, number in kinds.items() if number},
        token_bytes=_token_width(text) * item,
        state_bytes=_state_bytes(text, item) if kinds[RECURRENT] else 0,
        longest=_number(text, "max_position_embeddings", "n_positions", "max_sequence_length"),
        unknown=tuple(sorted({name for name in names if name not in KINDS})),
        drafts=_number(text, "num_nextn_predict_layers", "mtp_num_hidden_layers"),
        sparse="index_topk" in text,
        first_mamba=bool(kinds[RECURRENT]) and (text.get("model_type") in FIRST_MAMBAS or "mamba_dt_rank" in text),
        encoder_decoder=bool(config.get("is_encoder_decoder")),
    )


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first of these entries that is a number; 0 if none is."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def _names(config: Mapping[str, Any]) -> Sequence[str]:
    """A name for each layer that keeps a cache of its own, whichever of the usual ways the config has of telling."""
    lists = (config.get(name) for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"))
    names = next((found for found in lists if found), None)
    if names is None:
        count = _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        names = [_name(config, layer) for layer in range(count)]
    elif config.get("model_type") == "falcon_h1":
        names = ["hybrid"] * len(names)
    shared = _number(config, "num_kv_shared_layers")  # the last ones read the KV of earlier ones
    return [str(name) for name in names[: len(names) - shared]]


def _name(config: Mapping[str, Any], layer: int) -> str:
    """A layer's name in a config without a list of them."""
    if (whole := WHOLE.get(config.get("model_type", ""))) is not None:
        return whole
    if (indices := config.get("attn_layer_indices")) is not None:
        return "attention" if layer in indices else "mamba"
    if (period := config.get("attn_layer_period")) is not None:
        return "attention" if layer % period == config.get("attn_layer_offset", 0) else "mamba"
    if (interval := config.get("full_attention_interval")) is not None:
        return "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
    if config.get("attention_chunk_size") is not None:
        return "chunked_attention"
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return "full_attention"
    pattern = config.get("sliding_window_pattern")
    return "full_attention" if isinstance(pattern, int) and (layer + 1) % pattern == 0 else "sliding_attention"


def _token_width(config: Mapping[str, Any]) -> int:
    """Elements of one token in one attention layer."""
    if latent := _number(config, "kv_lora_rank"):
        return latent + _number(config, "qk_rope_head_dim")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _number(config, "num_key_value_heads", "num_kv_heads") or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    width = _number(config, "head_dim") or _number(config, "hidden_size", "n_embd", "d_model") // max(1, heads)
    return 2 * kv_heads * width


def _state_bytes(config: Mapping[str, Any], item: int) -> int:
    """Bytes of one layer's snapshot, of its convolution and its recurrence; 0 for a form that is not known here."""
    exact = 4 if "float32" in (config.get("mamba_ssm_cache_dtype"), config.get("mamba_ssm_dtype")) else item
    if values := _number(config, "linear_num_value_heads"):
        keys = _number(config, "linear_num_key_heads") * _number(config, "linear_key_head_dim")
        width, reach = _number(config, "linear_value_head_dim"), _number(config, "linear_conv_kernel_dim")
        recurrence = values * width * _number(config, "linear_key_head_dim")
        return (reach - 1) * (2 * keys + values * width) * item + recurrence * exact
    if reach := _number(config, "conv_L_cache"):
        return (reach - 1) * _number(config, "conv_dim", "hidden_size") * item
    own = config.get("model_type") == "mamba2"  # elsewhere these names speak of attention
    heads = _number(config, "mamba_n_heads", "mamba_num_heads", *(["num_heads"] if own else []))
    width = _number(config, "mamba_d_head", "mamba_head_dim", *(["head_dim"] if own else []))
    state = _number(config, "mamba_d_state", "ssm_state_size", "state_size")
    reach, groups = _number(config, "mamba_d_conv", "conv_kernel"), _number(config, "mamba_n_groups", "n_groups")
    if not (heads and width and state and reach):
        return 0
    return (reach - 1) * (heads * width + 2 * max(1, groups) * state) * item + heads * width * state * exact
