"""What would go wrong for a model under vLLM here, how much the pool holds of it, and the command that serves it.

Knows the connector's name and, in words, its refusals; imports nothing of it that imports vLLM.
"""

import json
import shlex
from collections.abc import Mapping
from math import ceil
from typing import Any

import msgspec

from layercast.config import Config, as_setting, as_written, rounded_down, size
from layercast.connector.vllm import MODULE, NAME
from layercast.doctor.checks import Check, Level, numbers
from layercast.doctor.machine import Facts, judge_vllm, memory_left
from layercast.doctor.model import Model
from layercast.spec.groups import GroupKind

GPU_BLOCK, CPU_BLOCK, CPU_LATENT_BLOCK = 16, 128, 16
"""Tokens of vLLM's blocks unless told otherwise."""
MIB = 1 << 20
CPU_CACHE_BYTES = 1 << 30
TELLS_TABLES, TELLS_FAILED = (0, 29), (0, 30)
WORDS = {
    GroupKind.FULL: "of full attention",
    GroupKind.WINDOW: "with a sliding window",
    GroupKind.LATENT: "of latent attention (MLA)",
    GroupKind.RECURRENT: "with a recurrent state",
}


def judge_model(model: Model, at: Facts) -> tuple[Check, ...]:
    """A check for each thing that matters to this model."""
    found = (
        _engine(at),
        _allocator(at),
        _plugin(at),
        _model(model, at),
        _weights(at),
        _groups(model, at),
        _bytes(model, at),
        _room(model, at),
        _own_memory(model, at),
        _ranks(model),
        _drafts(model),
    )
    return tuple(check for check in found if check is not None)


def serve_command(name: str, model: Model, at: Facts, role: str = "kv_both") -> str:
    """The command that serves the model with the connector, with the flags that it needs."""
    chosen, usual = msgspec.to_builtins(at.config), msgspec.to_builtins(Config())
    transfer = transfer_of(role, {key: value for key, value in chosen.items() if value != usual[key]})
    module = {} if at.plugin and at.allowed else {"kv_connector_module_path": MODULE}
    flags = [] if at.gpu else ["--kv-cache-memory-bytes", str(cpu_cache_bytes(model, at))]
    flags += ["--max-model-len", str(cpu_longest(model, at))] if cpu_longest(model, at) < model.longest else []
    flags += ["--enable-prefix-caching", "--mamba-cache-mode", "align"] if model.recurrent_layers else []
    return shlex.join(["vllm", "serve", name, *flags, *flag_of(transfer | module)])


def cpu_longest(model: Model, at: Facts) -> int:
    """Tokens of the longest prompt two of which take no more than half of the free memory on a CPU."""
    each = 2 * model.attention_layers * model.token_bytes
    left = memory_left(at)
    if at.gpu or left is None or not each:
        return model.longest
    return min(model.longest, left // 2 // each)


def cpu_cache_bytes(model: Model, at: Facts) -> int:
    """Memory for vLLM's own cache on a CPU: two of the longest prompts that it has room for, or CPU_CACHE_BYTES."""
    return max(CPU_CACHE_BYTES, 2 * cpu_longest(model, at) * model.attention_layers * model.token_bytes)


def transfer_of(role: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's transfer config for our connector, with sizes as a user would write them."""
    named = {"kv_connector": NAME, "kv_role": role, "kv_load_failure_policy": "recompute"}
    return named | ({"kv_connector_extra_config": as_written(settings)} if settings else {})


def flag_of(transfer: Mapping[str, Any]) -> tuple[str, str]:
    """A transfer config as vLLM's command takes it."""
    return "--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))


def block_tokens(model: Model, at: Facts) -> int:
    """Tokens of a block: the least of vLLM's steps whose KV in a layer is no smaller than a state."""
    step = GPU_BLOCK if at.gpu else CPU_LATENT_BLOCK if GroupKind.LATENT in model.layers else CPU_BLOCK
    if not (model.state_bytes and model.attention_layers and model.token_bytes):
        return step
    return step * max(1, -(-model.state_bytes // (step * model.token_bytes)))


def bytes_per_token(model: Model, at: Facts) -> float:
    """Bytes that the pool keeps for a token, over all layers; states are spread over the tokens between two of them."""
    from layercast.store.slab import SNAPSHOT_TOKENS  # here, since it brings numpy

    apart = max(block_tokens(model, at), SNAPSHOT_TOKENS)
    return model.attention_layers * model.token_bytes + model.recurrent_layers * model.state_bytes / apart


# ---- judging ----


def _engine(at: Facts) -> Check:
    if at.vllm is None:
        advice = "pip install vllm (its CPU build: make demo-vllm); until then there is only this report."
        return Check("vllm", Level.WARNING, "vLLM is not installed here.", advice)
    if not at.command:
        found = f"vLLM {at.vllm} is here under another package's name, so its command `vllm` does not start."
        advice = "make demo-vllm gives it the name; or: python -m vllm.entrypoints.openai.api_server --model MODEL ..."
        return Check("vllm", Level.WARNING, found, advice)
    return judge_vllm(at.vllm)


def _allocator(at: Facts) -> Check | None:
    if not at.expandable:
        return None
    found = "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, with which vLLM refuses every KV connector."
    return Check("allocator", Level.ERROR, found, "Unset it for vLLM.")


def _plugin(at: Facts) -> Check:
    module = f'Or name the module, as a command here does: "kv_connector_module_path":"{MODULE}"'
    if not at.plugin:
        found = "layercast is not installed beside vLLM, which finds the connector by an entry point of the package."
        return Check("plugin", Level.NOTE, found, f"pip install layercast there. {module}")
    if not at.allowed:
        return Check("plugin", Level.WARNING, "VLLM_PLUGINS leaves `layercast` out.", f"Add it there. {module}")
    return Check("plugin", Level.OK, "vLLM finds the connector by its name.")


def _model(model: Model, at: Facts) -> Check:
    layers = ", ".join(f"{count} layers {WORDS[kind]}" for kind, count in model.layers.items())
    found = f"{model.architecture}: {layers or 'no layers that are known here'}."
    if model.encoder_decoder:
        advice = "Serve it without --kv-transfer-config: vLLM has no KV connectors for encoder-decoder models."
        return Check("model", Level.ERROR, found, advice)
    if model.first_mamba and not at.gpu:
        found = f"{found} vLLM has no kernel for Mamba-1 on a CPU, with or without a connector."
        return Check("model", Level.ERROR, found, "Serve it on a GPU.")
    if model.first_mamba:
        found = f"{found} These are Mamba-1's, which was never tried."
        return Check("model", Level.WARNING, found, "Compare a few answers with and without the connector first.")
    if model.unknown:
        strange = f"{found} Others: {', '.join(model.unknown)}; the connector refuses caches that it does not know."
        return Check("model", Level.WARNING, strange, "Start it once: a refusal comes at start and names the cache.")
    if model.sparse:
        strange = f"{found} Its attention keeps an index of its own, which was never tried."
        return Check("model", Level.WARNING, strange, "Compare a few answers with and without the connector first.")
    return Check("model", Level.OK, found)


def _weights(at: Facts) -> Check | None:
    if at.weight_bytes is not None:
        return None
    found = "Beside the config there are no weights, so vLLM would not start."
    return Check("weights", Level.WARNING, found, "Download them; to try without: --load-format dummy")


def _groups(model: Model, at: Facts) -> Check:
    release = numbers(at.vllm) if at.vllm else TELLS_FAILED
    if len(model.layers) == 1:
        how = "One kind of cache: a hit is loaded layer by layer, inside the forward where that costs others little."
        kinds = ", ".join(model.layers)
        late = release < TELLS_TABLES and kinds in (GroupKind.WINDOW, GroupKind.RECURRENT)
    else:
        how = "Several kinds of cache, so several groups in vLLM: a hit is loaded in the background, decoding goes on."
        late = release < TELLS_FAILED
    if late:
        return Check("groups", Level.ERROR, f"{how} vLLM {at.vllm} refuses that.", "Use vLLM 0.30 or later.")
    if model.recurrent_layers:
        how += " States are kept at block boundaries: --enable-prefix-caching --mamba-cache-mode align."
    return Check("groups", Level.OK, how)


def _bytes(model: Model, at: Facts) -> Check:
    tokens = block_tokens(model, at)
    if model.recurrent_layers and not model.state_bytes:
        found = f"{model.attention_layers * model.token_bytes:,} bytes a token, and states of a form not known here."
        return Check("bytes", Level.NOTE, found)
    block = model.attention_layers * model.token_bytes * tokens + model.recurrent_layers * model.state_bytes
    found = (
        f"{model.attention_layers * model.token_bytes:,} bytes a token in {model.dtype}, {block:,} bytes a block of "
        f"{tokens} tokens (vLLM's default here; --block-size). A hit is whole blocks, and the last token is computed."
    )
    return Check("bytes", Level.OK, found)


def _room(model: Model, at: Facts) -> Check | None:
    each = bytes_per_token(model, at)
    if not each:
        return None
    tokens = int(at.config.host_bytes / each)
    found = f"{size(at.config.host_bytes)} (host_bytes) hold about {tokens:,} tokens"
    few = tokens < (block := block_tokens(model, at))
    if few:
        found = f"{found}, less than a block of {block}, so vLLM would not start with it"
    if not model.longest:
        return Check("room", Level.ERROR if few else Level.OK, f"{found}.", "Raise host_bytes." if few else "")
    level = Level.ERROR if few else Level.NOTE
    found = f"{found}: {tokens / model.longest:,.1f} prompts of {model.longest:,}, the longest it was made for."
    if tokens >= model.longest:
        return Check("room", Level.OK, found)
    need, left = MIB * ceil(model.longest * each / MIB), memory_left(at)
    most = need if left is None else left // (2 if at.gpu else 4)  # CPUs keep vLLM's cache too
    if need <= most:
        return Check("room", level, found, f"For one of them: --set host_bytes={as_setting(need)}")
    found = f"{found} One of them takes {size(need)}, more than the memory that is free here can spare."
    more = f"What fits is about {int(most / each):,} tokens: --set host_bytes={rounded_down(most)}"
    return Check("room", level, found, more if most > at.config.host_bytes else "")


def _own_memory(model: Model, at: Facts) -> Check | None:
    if at.gpu:
        return None
    found = "On a CPU vLLM takes nearly all memory for a cache of its own, or does not start where others use some."
    advice = f"--kv-cache-memory-bytes bounds it ({size(cpu_cache_bytes(model, at))} below); host_bytes comes on top."
    if (longest := cpu_longest(model, at)) < model.longest:
        advice += f" Prompts of {model.longest:,} tokens do not fit: --max-model-len {longest}."
    return Check("cache", Level.NOTE, found, advice)


def _ranks(model: Model) -> Check:
    share = "all of it" if GroupKind.LATENT in model.layers else "its heads' share of it"
    found = f"With --tensor-parallel-size each rank keeps {share} in host_bytes of its own."
    return Check("ranks", Level.OK, f"{found} Pipeline and context parallelism are refused.")


def _drafts(model: Model) -> Check | None:
    if not model.drafts:
        return None
    found = f"{model.drafts} layer(s) of its own may draft (--speculative-config): their KV is kept with the rest"
    return Check("drafts", Level.NOTE, f"{found}, and a hit is one block shorter.")
