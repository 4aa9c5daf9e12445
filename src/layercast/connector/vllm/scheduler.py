"""The scheduler-side hooks: lookups, promises and saves become orders; reports are settled.

Does not know tensors, addresses or how bytes move.
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorHandshakeMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from layercast.config import Config
from layercast.connector.vllm import events, neighbours, recovery
from layercast.connector.vllm.due import Due, tables_of
from layercast.connector.vllm.extras import Adapters, extras_of
from layercast.connector.vllm.forwards import Forwards
from layercast.connector.vllm.holds import Holds
from layercast.connector.vllm.metadata import NO_REPORTS, NOTHING, Handshake, Orders, Reports
from layercast.connector.vllm.saves import LUMP, Saves
from layercast.connector.vllm.stats import Stats
from layercast.connector.vllm.terms import Terms, terms_of
from layercast.connector.vllm.tracked import Tracked, first_sight
from layercast.connector.vllm.versions import TELLS_FAILED_REQUESTS, Tables, failed_requests
from layercast.control.memory import CLOSE_S
from layercast.control.node import scheduler_side
from layercast.control.scheduler import Match, SchedulerSide, WorkerFacts
from layercast.control.tables import Table
from layercast.errors import BrokenInvariant, NotCacheable
from layercast.flow.orders import LoadOutcome, SaveOrder, SaveOutcome
from layercast.observe.receipts import DISK, MissReason
from layercast.plan.policy import NO_HIT

_log = logging.getLogger("layercast")
ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""Ends that come with the output of a step, so of one whose loads have not failed."""
KEPT_OUTCOMES = 1000
ASK_AGAIN_S = 1.0
"""Longest time that a request waits for blocks of its prompt that are being saved, or loaded for another."""
DRAIN_S = 5.0
"""Longest time that an idle engine keeps stepping for reports of its last saves."""


class SchedulerHooks(KVConnectorBase_V1):
    """One engine. What a worker must know of a step goes into `build_connector_meta` and nowhere else."""

    config: Config
    _holds: Holds
    _layout: str

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.side: SchedulerSide | None = None
        self.outcomes: deque[LoadOutcome | SaveOutcome] = deque(maxlen=KEPT_OUTCOMES)
        """The last loads and saves to end, one entry a rank."""
        self.tracked: dict[str, Tracked] = {}
        scheduling = self._vllm_config.scheduler_config
        self._forwards = Forwards(scheduling.max_num_batched_tokens, 1 + bool(scheduling.async_scheduling))
        self._tables = Tables()
        self._facts: dict[int, WorkerFacts] = {}
        self._stats = Stats()
        self._adapters = Adapters()
        self._due = Due()
        self._drain_until_s = 0.0
        several = len(self._kv_cache_config.kv_cache_groups) > 1
        self._background = several or not recovery.AVAILABLE
        """Whether loads end before a forward reads them: a load that fails inside one can't be told of by its blocks
        where several groups number theirs, nor be recomputed by a scheduler that delivers what was in flight."""

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Make the directory from what the workers registered: vLLM brings it here across processes, once.

        Beside another connector that shakes hands, vLLM may bring that one's instead; then the workers' first reports
        say it, and until then nothing is loaded or saved.
        """
        self._meet({rank: hands.facts for rank, hands in metadata.items() if isinstance(hands, Handshake)})

    def _meet(self, facts: Mapping[int, WorkerFacts]) -> None:
        self._facts.update(facts)
        if self.side is None and len(self._facts) == self._vllm_config.parallel_config.tensor_parallel_size:
            ranks = [self._facts[rank] for rank in sorted(self._facts)]
            self.side = scheduler_side(ranks, self.config, True, not self._background, self._forwards.depth)
            if events.wanted(self._vllm_config):
                self.side.directory.record()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool whose blocks are held while copies read or write them."""
        self._holds = Holds(neighbours.in_order(gpu_block_pool), self._reused)
        if not self._background:
            recovery.install()

    @cached_property
    def _terms(self) -> Terms:
        return terms_of(self._vllm_config, self._kv_cache_config, self._kv_transfer_config, self._side.specs)

    def _reused(self, order: str) -> None:
        self._side.doom(order)

    @property
    def _side(self) -> SchedulerSide:
        if self.side is None:
            raise BrokenInvariant("no worker has said yet what it registered; report this")
        return self.side

    @cached_property
    def _saves(self) -> Saves:
        most = 1 + (getattr(self._vllm_config.speculative_config, "num_speculative_tokens", 0) or 0)
        return Saves(self._side, self._tables, most)

    # ---- loads ----

    def on_new_request(self, request: Request) -> None:
        """Have what lies below the slab brought up while the request waits in the queue."""
        if self.side is not None and self.side.backing.there:
            known = self._track(request)
            if known.load and not request.skip_reading_prefix_cache:
                self.side.seek(request.request_id, known.tokens, known.extras)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond those that vLLM holds, whether in the background); None: ask again."""
        if self.side is None:
            return 0, False
        known = self._track(request)
        known.local = num_computed_tokens
        if not known.load or request.skip_reading_prefix_cache:
            known.miss = known.miss or MissReason.DECLINED
            return 0, False
        costs = self._side.chooser.rates.estimate if self._terms.at_once else None
        known.match = match = self._side.match(
            known.tokens,
            known.extras,
            num_computed_tokens,
            request.request_id,
            self._terms.spare_last,
            self._forwards.company(request.request_id, costs),
            self._forwards.most_tokens,
            known.match,
        )
        rising, tokens = self._side.rising(request.request_id, bool(match.coming)), match.tokens - num_computed_tokens
        coming = match.coming or (tokens > 0 and self._comes_for_another(known, match))
        if (coming or rising) and known.may_wait(self.config.layer_wait_ms / 1000 if rising else ASK_AGAIN_S):
            return None, False
        known.miss = match.miss
        if self._side.backing.fetched(request.request_id):
            known.tier = DISK
        return max(0, tokens), match.decision.parked and tokens > 0

    def _comes_for_another(self, known: Tracked, match: Match) -> bool:
        """Whether most of what it would load is being loaded already, and vLLM's own cache will have it."""
        shared = self._vllm_config.cache_config.enable_prefix_caching
        return shared and any(other is not known and other.brings(match) for other in self.tracked.values())

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Keep the promise: lease the match's blocks and order their load."""
        if (known := self.tracked.get(request.request_id)) is None:
            return
        match = known.match
        if not known.counted:
            known.counted, mode = True, NO_HIT.mode if match is None else match.decision.mode
            self._stats.looked_up(num_external_tokens, known.tier, mode, known.miss)
        if match is None or num_external_tokens == 0:
            return
        self._forwards.failed.discard(known)
        known.promised, known.decision, known.parked = num_external_tokens, match.decision, match.decision.parked
        tables = tables_of(blocks.get_block_ids())
        order = self._side.load_order(request.request_id, match, tables)
        if order is None:
            self._lost(known, match, tables)
            return
        self._due.aborts += self._forwards.left_behind(request.request_id)
        known.order, known.loading = order.id, order
        if not known.local:
            known.saved = match.tokens  # the pool has all that the engine holds of it
        self._drain_until_s = time.monotonic() + DRAIN_S
        if known.parked:
            self._due.background.append(order)
        else:
            self._due.loads.append(order)
            self._forwards.reading.add(order.id)
            self._forwards.admitted(match.nbytes, request.num_tokens - match.tokens)

    def _lost(self, known: Tracked, match: Match, tables: Sequence[Table]) -> None:
        """The blocks went between lookup and allocation: the promise is broken in the engine's own way."""
        self._forwards.failed.add(known)
        if known.parked:
            self._due.lost_requests.add(known.request.request_id)
        else:
            self._due.misled.add(known.request.request_id)
        if not (known.parked and TELLS_FAILED_REQUESTS):
            self._due.lost_blocks.update(
                block for table, needed in zip(tables, match.needed, strict=True) for i in needed if (block := table[i])
            )

    # ---- saves ----

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        """The step's orders: loads promised since the last one, saves of the blocks that it completes."""
        self._tables.step(scheduler_output)
        for name in scheduler_output.preempted_req_ids or ():
            if (known := self.tracked.get(name)) is not None and (doubtful := self._forwards.doubtful(name)):
                recovery.drop_in_flight(known.request)
                self._holds.doubt(doubtful)
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled and self._forwards.coming:
            self._join(scheduled)
        self._loads_are_known(scheduler_output)
        for load in (*self._due.loads, *self._due.background):
            self._holds.hold(load.id, load.pairs)
        self._forwards.read_by(scheduled, self.tracked, self._tables, misled=bool(self._due.lost_blocks))
        patience = 0
        if self.side is not None:
            self.side.name()  # what the last step saves: its forward is under way
            patience = self._saves.patience(len(scheduled), self._holds.free)
            for save in self._saves.step(scheduler_output, self.tracked, patience > 0):
                self._order(save)
        self._forwards.began(scheduled, bool(self._due.loads or self._due.joins))
        if self.side is not None and self.side.backing.waiting:
            self._due.tier += self.side.backing.orders()
            self._drain_until_s = time.monotonic() + DRAIN_S
        due, self._due = self._due, self._due.then(patience, LUMP)
        return NOTHING if due.empty else due.orders()

    def _loads_are_known(self, scheduler_output: SchedulerOutput) -> None:
        """The loads are known, the saves not yet. Nothing is freed between a promise and this; blocks are held next."""

    def _join(self, scheduled: Collection[str]) -> None:
        """Have the forward wait for loads that were said to have come; a failed one is lost to the first that reads it.

        A forward waits for all of them, as others may find their blocks in vLLM's own cache.
        """
        coming = self._forwards.coming
        for name, order in list(coming.items()):
            known = self.tracked[name]
            failed = known in self._forwards.failed
            if known.loading is not order and not failed:
                del coming[name]
                continue
            if known.loading is order:
                self._due.joins.append(name)
                self._forwards.reading.add(order.id)
            if name in scheduled:
                known.parked = False
                if failed:
                    self._due.misled.add(name)
                    self._due.lost_blocks |= order.blocks
                del coming[name]

    def _order(self, save: SaveOrder) -> None:
        """Have a save made in the next step, and keep its blocks until it is over."""
        self._holds.keep(save.id, save.pairs)
        self._due.saves.append(save)
        self._drain_until_s = time.monotonic() + DRAIN_S

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save what its last steps completed and forget it. Its blocks may go: copies hold their own."""
        known = self.tracked.pop(request.request_id, None)
        self._forwards.left(request.request_id)
        if known is None:
            return False, None
        self._saves.forget(request.request_id)
        failed = known in self._forwards.failed
        self._forwards.failed.discard(known)
        answered = request.status in ANSWERED
        reading = known.loading is not None and not answered
        if not (reading or failed) and (save := self._saves.last(known, block_ids)) is not None:
            self._order(save)
        said = self._forwards.coming.pop(request.request_id, None)
        if (said and (reading or failed)) or (self._forwards.doubtful(request.request_id) and not answered):
            self._holds.doubt(block_ids[0])  # nobody may find a load, or what is made of one, that may yet fail
        if reading and known.parked:
            self._due.aborts.append(request.request_id)
        self._side.finish(request.request_id)
        if not self.tracked:
            self._holds.relinquish()
        if known.loading is None:
            self._leave_receipt(known)
        else:
            self._forwards.leaving[request.request_id] = known
        return False, known.reply

    def _leave_receipt(self, known: Tracked) -> None:
        if _log.isEnabledFor(logging.INFO):
            _log.info("receipt %s", msgspec.json.encode(known.receipt(self._layout)).decode())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, where another connector has made vLLM use one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    # ---- reports ----

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Settle what the workers report."""
        for request in failed_requests(connector_output):
            self._drain_until_s = time.monotonic() + DRAIN_S
            self._distrust(request)
            self._due.aborts.append(request)  # on other ranks it may still be under way
        meta = connector_output.kv_connector_worker_meta
        found = meta if isinstance(meta, Reports) else NO_REPORTS
        if found.facts:
            self._meet(dict(found.facts))
        for request in connector_output.finished_recving or ():
            known = self.tracked.get(request)
            if known is not None and known.loading is not None:
                self._forwards.coming[request] = known.loading
        for rank, report in found.reports:
            settled = self._side.settle(report, rank)
            for request in self._forwards.misread(settled.failed, self.tracked):
                self._distrust(request)
            for load in settled.loads:
                self._loaded(load, load.id in settled.ended)
            self._holds.release(settled.ended)
            self._forwards.reading.difference_update(settled.ended)
            outcomes: list[LoadOutcome | SaveOutcome] = [*settled.loads, *settled.saves]
            self.outcomes += outcomes
            for outcome in outcomes:
                self._stats.ended(outcome)
            self._stats.staged(rank, report.staging_bytes)
            for below in report.tier:
                self._stats.tier_ended(below)

    def _loaded(self, load: LoadOutcome, over: bool) -> None:
        """A load has ended on a rank, or over all of them."""
        leaving = self._forwards.leaving
        known = self.tracked.get(load.request) or leaving.get(load.request)
        if known is None or known.order != load.id:
            return
        known.heard(load)
        if over:
            known.loading = None
            if leaving.pop(load.request, None) is not None:
                self._leave_receipt(known)

    def _distrust(self, request: str) -> None:
        """A request whose load has failed once computes."""
        if (known := self.tracked.get(request)) is not None:
            known.load, known.loading = False, None
            self._forwards.failed.add(known)

    def get_kv_connector_stats(self) -> Stats | None:
        """What has been counted since the last call."""
        if self.side is not None:  # vLLM asks once a step, when its tokens are there
            self._forwards.ended(self.side.chooser.rates)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, Stats()
        return stats

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What has become visible in the pool and what was dropped since the last call, if somebody listens."""
        if self.side is None or self.side.directory.changes is None:
            return ()
        return events.events_of(self.side.directory.changes.take(), self.side.specs)

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine should go on stepping: copies are to be ordered or reported, and not overdue."""
        if self.side is None or time.monotonic() >= self._drain_until_s:
            return False
        return not self._due.empty or self._side.awaits_reports or self._side.backing.waiting

    def reset_cache(self) -> bool:
        """Change the identity of all KV: what is stored is found no more, nor is what live requests have computed.

        vLLM calls it when weights change, before it sleeps, and on request.
        """
        if self.side is not None:
            self.side.renew()
        for known in self.tracked.values():
            known.load = known.save = False
        return True

    def shutdown(self) -> None:
        """End what looks below the slab."""
        super().shutdown()
        if self.side is not None:
            self.side.close(CLOSE_S)

    def _track(self, request: Request) -> Tracked:
        known = self.tracked.get(request.request_id)
        if known is None:
            known, salt = first_sight(request, self._terms)
            if not self.tracked:
                self._holds.resume()
            self.tracked[request.request_id] = known
            try:
                known.extras = extras_of(request, self._adapters, self._saves.grain, salt)
            except NotCacheable:
                known.load = known.save = False
                known.miss = MissReason.NOT_CACHEABLE
        return known
