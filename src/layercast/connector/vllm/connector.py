"""The class that vLLM loads, in its scheduler and in each of its workers.

    KVTransferConfig(kv_connector="LayercastConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
                     kv_connector_extra_config={"host_bytes": 8 << 30})

Where the package is not installed, add kv_connector_module_path="layercast.connector.vllm.connector".
"""

import logging
from dataclasses import replace
from functools import cached_property
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from layercast.config import from_mapping
from layercast.connector.vllm import join_log
from layercast.connector.vllm.metadata import Orders
from layercast.connector.vllm.registration import refuse
from layercast.connector.vllm.scheduler import SchedulerHooks
from layercast.connector.vllm.stats import Metrics, Stats
from layercast.connector.vllm.versions import (
    DISK_SOURCE,
    HIT_SOURCE,
    NAMES_LAYOUTS,
    forward_waits,
    layout_in_force,
    writes_blocks,
)
from layercast.connector.vllm.worker import WorkerHooks
from layercast.observe.receipts import DISK
from layercast.observe.start import start_line
from layercast.spec.groups import GroupKind

_log = logging.getLogger("layercast")


class LayercastConnector(WorkerHooks, SchedulerHooks, SupportsHMA):
    """Loads a prompt's KV layer by layer inside the forward, from a pool in host memory, and saves it there.

    Settings are those of `config.Config`, in `kv_connector_extra_config`. Raises UnknownSetting, BadSetting, and
    UnsupportedModel for what it would not do right.
    """

    _cache_hit_source = HIT_SOURCE
    requires_kv_delivery = False
    """A pool owes nobody what it saves: a dropped save is a miss."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        join_log()  # named by its module, it comes without the entry point that does this
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.config = from_mapping(transfer.kv_connector_extra_config, "kv_connector_extra_config")
        refuse(vllm_config, kv_cache_config)
        self._layout = layout_in_force(vllm_config, kv_cache_config, self.config.block_major)
        if role is KVConnectorRole.SCHEDULER:
            self._say_what_is_in_force(transfer)

    def _say_what_is_in_force(self, transfer: KVTransferConfig) -> None:
        """Log the settings, and what a user may not expect of them."""
        if transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                "kv_load_failure_policy is %r: a request whose cached KV is lost or damaged will end in an error; "
                "set it to 'recompute'",
                transfer.kv_load_failure_policy,
            )
        _log.info("%s", start_line(self.config, transfer.kv_role, self._layout))
        if self.config.block_major and not self._layout.startswith("B"):
            _log.info("KV lies as %s: all layers of a block together were asked for, and not granted", self._layout)
        if transfer.kv_role != "kv_both" and not self.config.disk_path:
            _log.warning(
                "kv_role is %r, but nothing is shared with other engines: set disk_path to a folder that they all see",
                transfer.kv_role,
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        """As `SchedulerHooks` says; loads that nothing of vLLM's comes before may begin early."""
        orders = super().build_connector_meta(scheduler_output)
        if orders.orders is not None and orders.orders.joins:
            forward_waits(scheduler_output)
        loads = orders.orders is not None and (orders.orders.loads or orders.orders.background)
        return replace(orders, early=True) if loads and self._may_begin(scheduler_output) else orders

    def _loads_are_known(self, scheduler_output: SchedulerOutput) -> None:
        """Where this engine's worker is in this very process, what may begin early begins before saves are looked for.

        The worker is told of these with the rest of the step's orders.
        """
        if not (self._due.loads or self._due.background) or not self._may_begin(scheduler_output):
            return
        worker = get_kv_transfer_group() if has_kv_transfer_group() else None
        ours = self._kv_transfer_config.engine_id
        if isinstance(worker, WorkerHooks) and worker._kv_transfer_config.engine_id == ours:
            worker.handle_preemptions(self._due.orders(loads_alone=True))

    def _may_begin(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether nothing of vLLM's comes before this step's loads."""
        return self._steps_apart and not writes_blocks(scheduler_output)

    @cached_property
    def _steps_apart(self) -> bool:
        """Whether all of a step is queued before the next is scheduled, and vLLM moves no recurrent states itself."""
        drafts = self._vllm_config.speculative_config is not None
        return not drafts and all(spec.kind is not GroupKind.RECURRENT for spec in self._side.specs)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Where a request's hit came from, for vLLM's own metrics."""
        known = self.tracked.get(request.request_id)
        source = DISK_SOURCE if known is not None and known.tier == DISK else HIT_SOURCE
        return {source: num_external_tokens} if num_external_tokens else {}

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True: a recurrent state deeper than vLLM's own is loaded with whatever other groups lack."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Stats as they come across processes."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Metrics:
        """The metrics of the API server's /metrics."""
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: before a full graph starts, what it reads has been waited for; what it writes is saved after it."""
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether all layers of a block should lie together, as 0.26 to 0.28 ask."""
        return self.config.block_major

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The order of layers and blocks to ask for, where it has a name (0.29); None: any."""
        settings = from_mapping(vllm_config.kv_transfer_config.kv_connector_extra_config, "kv_connector_extra_config")
        return "BLNHC" if NAMES_LAYOUTS and settings.block_major else None
