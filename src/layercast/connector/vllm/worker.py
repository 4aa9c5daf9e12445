"""The worker-side hooks: a step's orders become copies and gates, what ended becomes a report.

Does not know keys, leases or why something moves.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import msgspec
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import AttentionBackend

from layercast.config import Config
from layercast.connector.vllm.metadata import Handshake, Orders, Reports
from layercast.connector.vllm.registration import register
from layercast.connector.vllm.stats import FULL_GRAPH_STEPS, Stats
from layercast.connector.vllm.versions import TELLS_FAILED_REQUESTS, TransferResults, by_layer, fill_at_once
from layercast.control.node import open_worker
from layercast.control.scheduler import WorkerFacts
from layercast.flow.layer_step import LayerStep
from layercast.flow.orders import LoadEnd, LoadOrder, ReceiveOrder, StepOrders, StepReport
from layercast.flow.worker import Worker
from layercast.move.base import Flight
from layercast.observe.timeline import OFF, Timeline

STUCK_S = 10.0
"""Longest wait for a copy that nobody needs any more, and whose target is about to be written by others."""

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults


class WorkerHooks(KVConnectorBase_V1):
    """One rank. A step is begun only where there is something to move; it ends with `wait_for_save`, or where vLLM
    leaves that out with its metadata."""

    config: Config
    _worker: Worker
    _layers: Mapping[str, int]
    _handshake: Handshake
    _target: frozenset[int]
    _failed: set[str]
    """Requests of this step whose loads have been reported as failed."""
    _unheard: set[str]
    """Layers of which no hook has been called yet: what a forward reads of them is waited for before it starts."""
    _stats: Stats
    timeline: ClassVar[Timeline] = OFF
    link_gbps: ClassVar[float | None] = None
    """What a subclass may measure with: a recorder, and a link to pace copies to (see `open_worker`)."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._closing = ExitStack()
        self._introduced = False
        self._step: LayerStep | None = None
        self._failed_blocks: set[int] = set()
        self._awaited: dict[str, set[int]] = {}
        """Requests whose loads are in the background, and the blocks that these fill."""
        self._reports: list[tuple[int, StepReport]] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the slab for the engine's memory and start what copies; those of an earlier registration end."""
        self._closing.close()
        found = register(self._vllm_config, self._kv_cache_config, kv_caches, lasting=bool(self.config.disk_path))
        self._layers, self._target, self._unheard = found.layers, found.target, set(found.layers)
        keep = tuple(kv_caches.values())
        opened = open_worker(
            found.layout,
            self.config,
            keep=keep,
            link_gbps=self.link_gbps,
            timeline=self.timeline,
            rank=get_tensor_model_parallel_rank(),
            ranks=self._vllm_config.parallel_config.tensor_parallel_size,
        )
        self._worker = self._closing.enter_context(opened)
        specs = tuple(group.spec for group in found.layout.groups)
        sizes = tuple(group.block_bytes for group in found.layout.groups)
        self._handshake = Handshake(WorkerFacts(specs, found.identities, self._worker.ways.slots, sizes))

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]) -> None:
        """As `register_kv_caches`, where 0.26 to 0.28 have put all layers of a block together."""
        self.register_kv_caches(by_layer(self._kv_cache_config, kv_cache, attn_backend))

    def get_handshake_metadata(self) -> Handshake:
        """What the scheduler side must know of this rank."""
        return self._handshake

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step's loads as early as may be: they gain what vLLM takes to prepare the forward's inputs, and where
        no forward under way uses their blocks, what is left of these."""
        if isinstance(kv_connector_metadata, Orders) and kv_connector_metadata.early and self._step is None:
            assert kv_connector_metadata.orders is not None
            self._begin(kv_connector_metadata.orders, () if self._at_once else (self._worker.mover.mark(),))

    @cached_property
    def _at_once(self) -> bool:
        """Whether loads wait for nothing that is queued; asked once vLLM has made the connector that it calls."""
        outermost = get_kv_transfer_group() if has_kv_transfer_group() else self
        return fill_at_once(self._vllm_config, self._handshake.facts.specs, outermost._kv_transfer_config)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step. One whose forward reads loads waits for `start_load_kv`, which comes before that forward."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Orders)
        orders = connector_metadata.orders
        if self._step is not None and (orders is None or self._step.number != orders.step):
            self._step.abandon()  # its forward has raised, or never came, and nothing of it was ended
            self._end()
        self._failed_blocks |= connector_metadata.lost_blocks
        if connector_metadata.misled:
            self._note(StepReport(-1, connector_metadata.misled))
        if orders is not None and self._step is not None:
            self._step.add(orders)
        elif orders is not None and not (orders.loads or orders.joins):
            self._begin(orders, (self._worker.mover.mark(),))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Begin a step with loads, behind whatever the engine has done to their blocks so far.

        A forward replayed as one full graph passes no layer's hook, so there all of them are waited for here; so are,
        in any forward, layers whose hooks were never seen to be called.
        """
        metadata = self._connector_metadata
        if not isinstance(metadata, Orders) or metadata.orders is None:
            return
        if self._step is None:
            self._begin(metadata.orders, (self._worker.mover.mark(),))
        elif not metadata.early or not (metadata.orders.loads or metadata.orders.joins):
            return
        called = (
            forward_context.attn_metadata is not None
            and "attn_metadata" not in kwargs
            and forward_context.cudagraph_runtime_mode is not CUDAGraphMode.FULL
        )
        if not called:
            self._stats.add(FULL_GRAPH_STEPS, "load")
        for name in self._unheard if called else self._layers:
            self._step_begun.wait(self._layers[name])

    def has_connector_metadata(self) -> bool:
        """Whether the layers of a forward are to call their hooks, which vLLM asks at each: where there is nothing to
        move, and all have been heard once, none needs to."""
        return self._step is not None or (bool(self._unheard) and super().has_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pass the layer's gate."""
        if self._step is not None:
            self._step.wait(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object) -> None:
        """Hand the layer off."""
        if self._unheard:
            self._unheard.discard(layer_name)
        if self._step is not None:
            self._step.written(self._layers[layer_name])

    def wait_for_save(self) -> None:
        """End the step."""
        if self._step is not None:
            self._end()

    def clear_connector_metadata(self) -> None:
        """End the step where vLLM has not waited for its saves."""
        if self._step is not None:
            self._end()
        super().clear_connector_metadata()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(None, requests whose background loads are over), for versions that tell failed ones by their blocks.

        There vLLM recomputes into the same blocks; raises as `_end`.
        """
        over, failed = self._over()
        if failed:
            self._worker.quiet_failed(STUCK_S)
        self._failed_blocks.update(*(blocks for name, blocks in over.items() if name in failed))
        return None, set(over) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        """Requests whose background loads are over, and which of them failed.

        With speculative decoding vLLM asks for results before the draft has run and `wait_for_save` comes.
        """
        over, failed = self._over()
        return TransferResults(set(), set(over), failed)

    def _over(self) -> tuple[dict[str, set[int]], set[str]]:
        """(request to the blocks of a background load that is over, those that failed)."""
        if self._step is not None:
            self._judge()
        lost = self._connector_metadata.lost_requests if isinstance(self._connector_metadata, Orders) else frozenset()
        if self._worker.idle and not lost:
            return {}, set()
        ends = self._worker.awaited()
        failed = {request for request, end in ends if end not in (LoadEnd.LANDED, LoadEnd.ABORTED)} | lost
        return {request: self._awaited.pop(request, set()) for request in (*(name for name, _ in ends), *lost)}, failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to recompute."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> Reports | None:
        """What ended since the last call, and the first time what was registered."""
        if self._step is None and not self._worker.idle:
            self._note(self._worker.report(-1))
        reports, self._reports = self._reports, []
        if not self._introduced:
            self._introduced = True
            return Reports(tuple(reports), ((get_tensor_model_parallel_rank(), self._handshake.facts),))
        return Reports(tuple(reports)) if reports else None

    @property
    def _step_begun(self) -> LayerStep:
        assert self._step is not None
        return self._step

    def _begin(self, orders: StepOrders, after: Sequence[Flight]) -> None:
        self._step = self._worker.begin(orders, after=after)
        self._failed = set()
        if not TELLS_FAILED_REQUESTS:
            self._awaited.update((load.request, load.blocks) for load in orders.background)

    def _end(self) -> None:
        """Raises DeadlineExceeded if a copy into a block that is to be recomputed has not ended in STUCK_S.

        vLLM recomputes a failed load into the same blocks, so a copy that came late must not land in them any more:
        better no engine than wrong text.
        """
        assert self._step is not None
        reads, ended, self._step = self._step.reads, self._step.end(STUCK_S), None
        news = tuple(request for request in ended.failed if request not in self._failed)
        self._note(msgspec.structs.replace(ended, failed=news))
        self._fail(news, reads)

    def _judge(self) -> None:
        """Report the loads that the model itself has read, or should have; raises as `_end`."""
        assert self._step is not None
        failed = self._step.judge(self._target)
        self._step.quiet_failed(STUCK_S)
        self._note(self._worker.report(self._step.number, failed))
        self._fail(failed, self._step.reads)

    def _fail(self, requests: Sequence[str], reads: Sequence[LoadOrder | ReceiveOrder]) -> None:
        """reads: the loads that the forward waited for."""
        self._failed.update(requests)
        for load in reads:
            if load.request in requests and isinstance(load, LoadOrder):
                self._failed_blocks |= load.blocks

    def _note(self, report: StepReport) -> None:
        if report.loads or report.saves or report.failed or report.tier:
            self._reports.append((get_tensor_model_parallel_rank(), report))

    def shutdown(self) -> None:
        """End the threads and give the slab back."""
        super().shutdown()
        self._closing.close()
