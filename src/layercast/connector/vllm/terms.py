"""What an engine's configuration settles once, for all of its requests.

vLLM works some of it out anew at each question, which costs a look-up a good part of its time. Does not know requests.
"""

from collections.abc import Sequence

import msgspec
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from layercast.connector.vllm.versions import digested, drops_last_block, fill_at_once
from layercast.spec.groups import GroupSpec


class Terms(msgspec.Struct, frozen=True):
    """loads, saves: whether its role lets it. digested, spare_last, at_once: as in `versions`."""

    loads: bool
    saves: bool
    digested: int
    spare_last: bool
    at_once: bool


def terms_of(config: VllmConfig, caches: KVCacheConfig, role: KVTransferConfig, specs: Sequence[GroupSpec]) -> Terms:
    """The terms of an engine's scheduler side. role: the connector's own."""
    return Terms(
        loads=role.is_kv_consumer,
        saves=role.is_kv_producer,
        digested=digested(config, caches),
        spare_last=drops_last_block(config.speculative_config),
        at_once=fill_at_once(config, specs, role),
    )
