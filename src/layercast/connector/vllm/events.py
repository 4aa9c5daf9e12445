"""The pool's changes as vLLM's KV events, which its publisher carries to whoever routes requests.

A block's hash is the pool's own key, and its medium "CPU". Token ids are told where they alone decide the key: not
with adapters, media or salts. Does not know the directory.
"""

from collections.abc import Iterable, Sequence

from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent

from layercast.control.changes import Change
from layercast.spec.groups import GroupSpec


def wanted(config: VllmConfig) -> bool:
    """Whether somebody listens."""
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def events_of(changes: Iterable[Change], specs: Sequence[GroupSpec]) -> list[KVCacheEvent]:
    """One event a change."""
    return [
        _stored(change, specs[change.group].block_size) if change.stored else _removed(change) for change in changes
    ]


def _stored(change: Change, block_size: int) -> BlockStored:
    start = change.first * block_size
    return BlockStored(
        block_hashes=list(change.keys),
        parent_block_hash=change.parent,
        token_ids=list(change.tokens[start : start + len(change.keys) * block_size]),
        block_size=block_size,
        lora_id=None,
        medium=MEDIUM_CPU,
        lora_name=None,
        group_idx=change.group,
    )


def _removed(change: Change) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(change.keys), medium=MEDIUM_CPU, group_idx=change.group)
