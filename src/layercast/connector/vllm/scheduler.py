"""The scheduler-side hooks: lookups, promises and saves become orders; reports are settled.

Does not know tensors, addresses or how bytes move.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorHandshakeMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from layercast.config import Config
from layercast.connector.vllm.metadata import Handshake, Orders, Reports
from layercast.control.node import scheduler_side
from layercast.control.scheduler import Match, SchedulerSide, Table
from layercast.errors import BrokenInvariant
from layercast.flow.orders import LoadOrder, LoadOutcome, SaveOrder, SaveOutcome, StepOrders

KEPT_OUTCOMES = 1000


class SchedulerHooks(KVConnectorBase_V1):
    """One engine. What a worker must know of a step goes into `build_connector_meta` and nowhere else."""

    config: Config

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.side: SchedulerSide | None = None
        self.outcomes: deque[LoadOutcome | SaveOutcome] = deque(maxlen=KEPT_OUTCOMES)
        """The last loads and saves to end, one entry a rank."""
        self._requests: dict[str, Request] = {}
        self._found: dict[str, Match] = {}
        self._loads: list[LoadOrder] = []
        self._steps = count()

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Make the directory from what the workers registered: vLLM brings it here across processes, once."""
        facts = [hands.facts for _, hands in sorted(metadata.items()) if isinstance(hands, Handshake)]
        self.side = scheduler_side(facts, self.config, shared_blocks=True)

    @property
    def _side(self) -> SchedulerSide:
        if self.side is None:
            raise BrokenInvariant("no worker has said what it registered; vLLM 0.30 or later passes that on at start")
        return self.side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens that can be loaded beyond those that vLLM holds, False: inside the forward)."""
        if not _nameable(request):
            return 0, False
        match = self._side.match(request.all_token_ids[:], local_tokens=num_computed_tokens)
        self._found[request.request_id] = match
        return max(0, match.tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Keep the promise: lease the match's blocks and order their load."""
        self._requests[request.request_id] = request
        match = self._found.pop(request.request_id, None)
        if match is None or num_external_tokens == 0:
            return
        order = self._side.load_order(request.request_id, match, _tables(blocks.get_block_ids()))
        if order is None:
            raise BrokenInvariant(f"{request.request_id}: its blocks went between lookup and allocation; report this")
        self._loads.append(order)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        """The step's orders: loads promised since the last one, saves of the prompt blocks that it completes."""
        saves = [
            self._save(request, tokens, scheduler_output)
            for request, tokens in scheduler_output.num_scheduled_tokens.items()
        ]
        loads, self._loads = self._loads, []
        return Orders(StepOrders(next(self._steps), tuple(loads), tuple(save for save in saves if save is not None)))

    def _save(self, name: str, scheduled: int, output: SchedulerOutput) -> SaveOrder | None:
        request = self._requests[name]
        before = request.num_computed_tokens
        after = min(before + scheduled, request.num_prompt_tokens)
        if before >= after or not _nameable(request):
            return None
        tables = _tables(output.kv_connector_block_state.get_block_ids(name))
        return self._side.save_order(name, request.all_token_ids[:after], before, after, tables)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Settle what the workers report."""
        found = connector_output.kv_connector_worker_meta
        for rank, report in found.reports if isinstance(found, Reports) else ():
            settled = self._side.settle(report, rank)
            self.outcomes += (*settled.loads, *settled.saves)

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Forget the request. Its blocks may go: no copy outlives the step that began it."""
        self._requests.pop(request.request_id, None)
        self._found.pop(request.request_id, None)
        self._side.finish(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Refused: a pool that can't forget all would answer with the KV of old weights."""
        return False


def _tables(block_ids: Sequence[Sequence[int]]) -> list[Table]:
    """Block tables by group; vLLM's block 0 is the null block."""
    return [[block or None for block in ids] for ids in block_ids]


def _nameable(request: Request) -> bool:
    """Whether tokens alone decide its KV. Adapters, media, embeddings and salts get no keys here yet."""
    return not (request.lora_request or request.mm_features or request.cache_salt) and request.prompt_embeds is None
