"""The worker-side hooks: a step's orders become copies and gates, what ended becomes a report.

Does not know keys, leases or why something moves.
"""

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from layercast.config import Config
from layercast.connector.vllm.metadata import Handshake, Orders, Reports
from layercast.connector.vllm.registration import register
from layercast.control.node import open_worker
from layercast.control.scheduler import WorkerFacts
from layercast.flow.orders import StepReport
from layercast.flow.worker import LayerStep, Worker


class WorkerHooks(KVConnectorBase_V1):
    """One rank. A step begins when its metadata is bound, since `start_load_kv` may come after the forward."""

    config: Config
    _worker: Worker
    _layers: Mapping[str, int]
    _handshake: Handshake

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._closing = ExitStack()
        self._rank = 0
        self._step: LayerStep | None = None
        self._failed_blocks: set[int] = set()
        self._reports: list[tuple[int, StepReport]] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the slab for the engine's memory and start what copies."""
        found = register(self._vllm_config, self._kv_cache_config, kv_caches)
        self._layers = found.layers
        opened = open_worker(found.layout, self.config, keep=tuple(kv_caches.values()))
        self._worker = self._closing.enter_context(opened)
        specs = tuple(group.spec for group in found.layout.groups)
        self._handshake = Handshake(WorkerFacts(specs, found.identities, self._worker.ways.slots))
        self._rank = get_tensor_model_parallel_rank()

    def get_handshake_metadata(self) -> Handshake:
        """What the scheduler side must know of this rank."""
        return self._handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Orders)
        self._step = self._worker.begin(connector_metadata.orders)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Nothing: loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pass the layer's gate."""
        if self._step is not None:
            self._step.wait(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object) -> None:
        """Hand the layer off."""
        if self._step is not None:
            self._step.written(self._layers[layer_name])

    def wait_for_save(self) -> None:
        """End the step. Raises DeadlineExceeded if a copy is still under way after `layer_wait_ms`.

        vLLM may hand out the blocks of this step's requests as soon as this returns, so no copy may still read them
        (a save) or write them (a load that came late). Until source blocks are held by reference (`touch` on the
        engine's block pool), that means waiting here, and ending the engine rather than risking wrong text.
        """
        assert self._step is not None
        ended, self._step = self._step.end(), None
        self._worker.quiet(self.config.layer_wait_ms / 1000)
        rest = self._worker.report(ended.step)
        self._reports += [
            (self._rank, report) for report in (ended, rest) if report.loads or report.saves or report.failed
        ]
        metadata = self._get_connector_metadata()
        for load in metadata.orders.loads:
            if load.request in ended.failed:
                self._failed_blocks.update(block for pair in load.pairs for block in pair.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to recompute."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> Reports | None:
        """What ended since the last call."""
        reports, self._reports = self._reports, []
        return Reports(tuple(reports)) if reports else None

    def shutdown(self) -> None:
        """End the threads and give the slab back."""
        super().shutdown()
        self._closing.close()
