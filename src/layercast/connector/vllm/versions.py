"""What differs between vLLM 0.26 and 0.33, each difference once.

Where a version lacks something, the same is had in its older way here, or `registration.refuse` says at start that it
is lacking. Does not know orders, slots or why something moves.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends import utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from layercast.spec.groups import GroupKind, GroupSpec

TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
TELLS_FAILED_REQUESTS = TransferResults is not None
"""Whether a failed background load is reported by its request (0.30), or by its blocks, which one group alone has."""
TELLS_TABLES = "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__
"""Whether a step's output tells whole block tables; where not they are followed, as long as no block leaves them."""
RESTORES_DEEPER_STATES = hasattr(base.KVConnectorBase_V1, "supports_divergent_local_hybrid_hits")
NAMES_LAYOUTS = find_spec("vllm.v1.kv_cache_layout") is not None
"""Whether a connector may ask for any order of layers and blocks by name (0.29)."""
TAGS_EXTRAS = '("cache_salt"' in inspect.getsource(generate_block_hash_extra_keys)
"""Whether a block's extra keys say what they are."""
DEFERS_FREES = "defer_block_free" in inspect.getsource(Scheduler.__init__)
"""Whether blocks of a request that ends, or is preempted, are free only once the forwards that use them have ended."""

if find_spec("vllm.v1.metrics.cache_hit_source") is not None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCE: object = CacheHitSource.HOST
    DISK_SOURCE: object = CacheHitSource.DISK
else:
    HIT_SOURCE = DISK_SOURCE = None


def layout_name(config: VllmConfig, caches: KVCacheConfig) -> str:
    """How vLLM calls the order in which a layer's caches lie."""
    if NAMES_LAYOUTS:
        return str(caches.kv_cache_layout)
    with set_current_vllm_config(config):
        return str(utils.get_kv_cache_layout())


def layout_in_force(config: VllmConfig, caches: KVCacheConfig, block_major: bool) -> str:
    """As `layout_name`, with "B" first where all layers of a block lie together. block_major: whether that was wanted.

    Before names (0.29), vLLM grants it on its first model runner alone, to one group whose backend finds blocks by
    stride.
    """
    name = layout_name(config, caches)
    if NAMES_LAYOUTS or not block_major or config.use_v2_model_runner or len(caches.kv_cache_groups) > 1:
        return name
    spec = caches.kv_cache_groups[0].kv_cache_spec
    return f"B{name}" if getattr(spec, "indexes_kv_by_block_stride", False) else name


def transferred_groups(caches: KVCacheConfig) -> int:
    """Number of cache groups that vLLM lets a connector move."""
    return len(getattr(caches, "transfer_group_ids", caches.kv_cache_groups))


def drops_last_block(drafts: SpeculativeConfig | None) -> bool:
    """Whether the last block of a hit is left out, as a draft's KV at its end depends on the token behind it."""
    if drafts is None:
        return False
    return bool(drafts.use_eagle_block_drop() if hasattr(drafts, "use_eagle_block_drop") else drafts.use_eagle())


def digested(config: VllmConfig, caches: KVCacheConfig) -> int:
    """Of how many tokens `Request.block_hashes` has one more; 0: not known, or two may have the same one."""
    if config.cache_config.prefix_caching_hash_algo not in ("sha256", "sha256_cbor"):
        return 0
    one = config.cache_config.block_size if len(caches.kv_cache_groups) == 1 else 0
    return getattr(caches, "hash_block_size", None) or one


def failed_requests(output: KVConnectorOutput) -> Iterable[str]:
    """Requests whose background loads have failed on some rank, in versions that tell."""
    found: Iterable[str] = getattr(output, "failed_recving", None) or ()
    return found


def writes_blocks(output: SchedulerOutput) -> bool:
    """Whether vLLM itself writes into blocks of the step (zeroes, copies on write) before its forward."""
    return bool(getattr(output, "new_block_ids_to_zero", None) or getattr(output, "kv_cache_block_copies", None))


def fill_at_once(config: VllmConfig, specs: Sequence[GroupSpec], role: KVTransferConfig) -> bool:
    """Whether loads may fill their blocks while forwards are under way, as none of these uses them any more.

    What leaves a window is free sooner, and a draft may run on when vLLM knows its forward's tokens. role: that of the
    connector which vLLM has made itself; it keeps what it frees from consumers alone.
    """
    whole = all(spec.kind in (GroupKind.FULL, GroupKind.LATENT) for spec in specs)
    return DEFERS_FREES and role.is_kv_consumer and whole and config.speculative_config is None


def forward_waits(output: SchedulerOutput) -> None:
    """Have `start_load_kv` called before the step's forward. Since 0.29 it comes behind one for which nothing is
    loaded that was matched in this very step."""
    if hasattr(output, "has_sync_kv_loads"):
        output.has_sync_kv_loads = True


def extra_keys(request: Request, start: int, end: int, medium: int) -> tuple[list[tuple[object, ...]], int]:
    """(what else the tokens [start, end) depend on, tagged, the next medium); as vLLM finds it.

    Older versions list it without tags, always in the order adapter, media, salt.
    """
    found, medium = generate_block_hash_extra_keys(request, start, end, medium)
    keys: list[Any] = list(found or ())
    if TAGS_EXTRAS:
        return keys, medium
    lora = [("lora", keys.pop(0))] if request.lora_request else []
    salt = [("cache_salt", keys.pop())] if start == 0 and request.cache_salt else []
    return [*lora, *(("mm", *key) for key in keys), *salt], medium


def by_layer(caches: KVCacheConfig, tensor: torch.Tensor, backend: type[AttentionBackend]) -> dict[str, torch.Tensor]:
    """Layer names to their views of the one tensor that 0.26 to 0.28 register for all layers."""
    order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    logical = tensor.permute(*(order.index(axis) for axis in range(len(order))))
    return {name: logical[index] for index, part in enumerate(caches.kv_cache_tensors) for name in part.shared_by}


class Tables:
    """Block tables of the requests of a step."""

    def __init__(self) -> None:
        self._state: Any = None
        self._followed: dict[str, list[list[int]]] = {}

    def step(self, output: SchedulerOutput) -> None:
        """Take a step's changes in."""
        if TELLS_TABLES:
            self._state = output.kv_connector_block_state
            return
        for name in output.finished_req_ids:
            self._followed.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._followed[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if not more:
                continue
            if name in cached.resumed_req_ids or name not in self._followed:
                self._followed[name] = [[] for _ in more]
            for ids, added in zip(self._followed[name], more, strict=True):
                ids.extend(added)

    def of(self, name: str) -> Sequence[Sequence[int]]:
        """A scheduled request's blocks, by group."""
        found: Sequence[Sequence[int]] = self._state.get_block_ids(name) if TELLS_TABLES else self._followed[name]
        return found

    def snapshots(self, name: str) -> Iterable[tuple[int, int, int]]:
        """(group, block, tokens) of the recurrent states that the step leaves at block boundaries."""
        offers: Mapping[str, Iterable[tuple[int, int, int]]] = (
            self._state.boundary_state_offloads if TELLS_TABLES else {}
        )
        return offers.get(name, ())
