"""An embedded engine: chunked prefill and ragged decode of a Hugging Face model over paged memory and a pool of KV.

One forward a step. The engine holds the blocks under every copy until its end is reported, discards a forward whose
load failed, and never looks at bytes. Does not know keys, slots, text or networks.
"""

import itertools
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from transformers import PreTrainedModel

from layercast.connector.transformers.allocator import BlockAllocator
from layercast.connector.transformers.cache import LayerwiseCache
from layercast.connector.transformers.geometry import cache_argument, read_geometry
from layercast.connector.transformers.memory import PagedMemory, first_block
from layercast.connector.transformers.pushes import PushDesk, wait_for_first_layer
from layercast.connector.transformers.requests import Finish, Output, Params, Request, Result, refuse_other_than_ids
from layercast.connector.transformers.sampling import next_token
from layercast.connector.transformers.schedule import Scheduler, Work
from layercast.connector.transformers.space import BlockSpace
from layercast.connector.transformers.view import forward_view
from layercast.control.messages import PushTicket
from layercast.control.pool import Pool
from layercast.control.scheduler import Settled
from layercast.errors import BadSetting, DeadlineExceeded, LayercastError, Refused
from layercast.flow.orders import LoadOutcome, SaveOrder, SaveOutcome, StepOrders
from layercast.flow.step import Step
from layercast.observe.receipts import MissReason
from layercast.spec.groups import GroupKind, Layout

REPORT_WAIT_S = 1.0
BUSY_WAIT_S = 0.02
"""Longest that requests wait for blocks under copy before the youngest of them gives its own back."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of an engine.

    block_size: tokens per block. blocks: blocks of each attention group. chunk_blocks: most blocks of a prompt in one
    forward. max_batch: most requests that answer at a time. state_block: tokens between snapshots of a recurrent
    state, a multiple of block_size; a chunk never crosses one, so that any chunking saves the same keys. poison: fill
    free blocks with NaN (to find a wrong read). stall_s: longest that `generate` waits while no forward can run.
    """

    block_size: int = 16
    blocks: int = 512
    chunk_blocks: int = 32
    max_batch: int = 8
    state_block: int = 64
    block_major: bool = False
    poison: bool = False
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        if min(self.block_size, self.blocks, self.chunk_blocks, self.max_batch, self.state_block) < 1:
            raise BadSetting(f"{self}: every size must be at least 1")
        if self.state_block % self.block_size:
            raise BadSetting(f"state_block = {self.state_block}: must be a multiple of block_size = {self.block_size}")

    @property
    def states(self) -> int:
        """Blocks of the recurrent group: running states, and as many snapshots under copy."""
        return 2 * self.max_batch + 2


class Engine:
    """Answers prompts, one forward a step. All methods belong to one thread.

    pool: makes the pool for this engine's memory, whose layout is known only once it is allocated. Raises
    UnsupportedModel.
    """

    def __init__(
        self, model: PreTrainedModel, pool: Callable[[Layout], Pool], settings: EngineSettings | None = None
    ) -> None:
        self.settings = settings or EngineSettings()
        self.model = model
        self.geometry = read_geometry(model)
        specs = self.geometry.specs(self.settings.block_size, self.settings.state_block)
        counts = [self.settings.states if s.kind is GroupKind.RECURRENT else self.settings.blocks + 1 for s in specs]
        self.memory = PagedMemory(self.geometry, specs, counts, block_major=self.settings.block_major)
        allocators = [BlockAllocator(first_block(s), n - first_block(s)) for s, n in zip(specs, counts, strict=True)]
        self.space = BlockSpace(specs, allocators, self.memory.poison if self.settings.poison else None)
        self.pool = pool(self.memory.layout)
        self.pushes = PushDesk(self.space)
        self._cache = LayerwiseCache(self.geometry, self.memory)
        self._schedule = Scheduler(self.space, self.pool, self._chunk, self.settings.max_batch)
        self._live: dict[str, Request] = {}
        self._steps = itertools.count()
        self._arrivals = itertools.count()

    def submit(self, prompt: Sequence[int], params: Params | None = None, push: PushTicket | None = None) -> str:
        """Queue a prompt (token ids); its request id. Raises Refused for one that can never be answered.

        push: prefill only, and send the KV to the decode engine whose ticket this is; the request ends when the push
        does. Raises as `PushSource.accept`.
        """
        request = self._request(prompt, params or Params())
        if push is not None:
            self.pushes.accept(request, push)
            request.until = push.tokens
        return self._queue(request)

    def offer(self, prompt: Sequence[int], params: Params | None = None) -> PushTicket:
        """Take a prompt whose KV another engine will push here; the ticket for it, which names the request.

        Raises Refused, also for a prompt of one token (nothing to push), and Full where no blocks are free now.
        """
        if len(prompt) == 1:
            raise Refused("a prompt of one token has no KV to push: submit it here")
        request = self._request(prompt, params or Params())
        self._schedule.expect(request)
        self._live[request.id] = request
        try:
            return self.pushes.offer(request)
        except LayercastError:
            self._end(request, Finish.ABORTED)
            raise

    def _queue(self, request: Request) -> str:
        self._live[request.id] = request
        self._schedule.add(request)
        return request.id

    def _request(self, prompt: Sequence[int], params: Params) -> Request:
        refuse_other_than_ids(prompt)
        vocabulary = self.model.config.get_text_config().vocab_size
        if not prompt:
            raise Refused("the prompt is empty: give at least one token")
        if not all(0 <= token < vocabulary for token in prompt):
            raise Refused(f"the prompt holds a token id outside 0..{vocabulary - 1}")
        self.space.refuse_if_too_long(len(prompt) + params.max_tokens - 1, self._chunk)
        arrival = next(self._arrivals)
        return Request(
            id=f"request-{arrival}",
            arrival=arrival,
            prompt_tokens=len(prompt),
            tokens=[int(token) for token in prompt],
            params=params,
            generator=torch.Generator().manual_seed(params.seed),
            tables=self.space.tables(),
            load=params.load,
            miss=None if params.load else MissReason.DECLINED,
        )

    def step(self) -> list[Output]:
        """Run one forward; the tokens and results it brought. Nothing to run: wait shortly for pending copies."""
        return self._advance()[0]

    def _advance(self) -> tuple[list[Output], bool]:
        """As `step`; and whether anything went on."""
        pushed = [self._pushed(self._live[id], reason) for id, reason in self.pushes.ended() if id in self._live]
        work = self._schedule.next()
        if work is not None:
            return pushed + self._run(work), True
        if not pushed:
            self._wait(BUSY_WAIT_S if self._schedule.busy else REPORT_WAIT_S)
        return pushed, bool(pushed)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Params | Sequence[Params] | None = None
    ) -> list[Result]:
        """Answer all prompts; results in their order. One Params for all of them, or one for each.

        Raises DeadlineExceeded, and has aborted them, where no forward could run for `stall_s`: copies that never end
        keep the blocks.
        """
        each = [params] * len(prompts) if params is None or isinstance(params, Params) else params
        # Every prompt is checked before one is queued.
        requests = [self._request(prompt, how or Params()) for prompt, how in zip(prompts, each, strict=True)]
        ids = [self._queue(request) for request in requests]
        results: dict[str, Result] = {}
        deadline = time.monotonic() + self.settings.stall_s
        while left := [id for id in ids if id not in results]:
            outputs, went_on = self._advance()
            results.update({output.request: output.result for output in outputs if output.result})
            if went_on:
                deadline = time.monotonic() + self.settings.stall_s
            elif time.monotonic() > deadline:
                for id in left:
                    self.abort(id)
                raise DeadlineExceeded(
                    f"no forward could run for {self.settings.stall_s:g} s: {self.space.held} copies and pushes hold "
                    "blocks and do not end; see to the pool's mover and the peers, or raise blocks"
                )
        return [results[id] for id in ids]

    def abort(self, request: str) -> Result:
        """End a request now; what it has so far. Raises Refused for a request that is not under way."""
        if request not in self._live:
            raise Refused(f"{request!r} is not under way: it has ended, or was never submitted")
        self.pool.abort(request)
        self.pushes.abandon(self._live[request])
        return self._end(self._live[request], Finish.ABORTED)

    def drain(self, timeout_s: float) -> None:
        """Wait until every copy and push under way has ended. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        while self.space.held or self.pushes.pending or self.pool.busy_below:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self.space.held} copies and {self.pushes.pending} pushes had not ended after {timeout_s:g} s"
                )
            self._wait(min(left, REPORT_WAIT_S))
            self.pushes.settle()

    @property
    def idle(self) -> bool:
        """Whether no request is under way and no copy pending."""
        return not self._live and not self.space.held and not self.pushes.pending

    @property
    def _chunk(self) -> int:
        return self.settings.chunk_blocks * self.settings.block_size

    def _wait(self, timeout_s: float) -> None:
        """Without a forward to run: wait for what lets one run, or for what is under way to end."""
        arriving = self._schedule.arriving()
        if self.space.pending or self.pool.busy_below:
            try:
                settled = self.pool.reports(next(self._steps), timeout_s)
            except DeadlineExceeded:  # some are still under way; take what there is
                settled = self.pool.reports(next(self._steps))
            self._settle(settled)
        elif arriving is not None:
            wait_for_first_layer(arriving, timeout_s)
        elif self.pushes.pending:
            self.pushes.wait(timeout_s)

    def _run(self, work: Work) -> list[Output]:
        saves, snapshots = self._saves(work)
        loads = (work.load,) if work.load else ()
        for order in (*loads, *saves):
            self.space.hold(order.id, order.pairs)
        pushes = [order for r in work.requests if (order := self.pushes.order(r, r.done + work.new))]
        receives = (work.receive,) if work.receive else ()
        step = self.pool.begin(StepOrders(next(self._steps), loads, tuple(saves), tuple(pushes), receives))
        try:
            logits = self._forward(work, step, snapshots)
        except BaseException:
            # Half-written blocks must not be saved, and nobody is left to run these requests.
            for request in work.requests:
                self.pool.abort(request.id)
                self.pushes.abandon(request)
            self._settle(self.pool.settle(step.end()))
            for request in work.requests:
                self._end(request, Finish.ABORTED)
            raise
        self._drop_snapshots(work)
        settled = self.pool.settle(step.end())
        self._settle(settled)
        self.pushes.landed(work.requests[0])
        if work.requests[0].id in settled.failed:  # only a lone request can have a load
            self.pushes.abandon(work.requests[0], "a load that it was computed from has failed")
            self._schedule.broken(work.requests[0])
            return []
        self._schedule.ran(work)
        return [
            self._sampled(request, row)
            for request, row in zip(work.requests, logits, strict=True)
            if request.remaining == 0 and request.until is None
        ]

    def _forward(self, work: Work, step: Step, snapshots: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Last-token logits `[B, vocabulary]`, after which the rows and states of all requests lie in their blocks."""
        device = self.model.device
        past = [request.done for request in work.requests]
        view = forward_view(self.memory.specs, [request.tables for request in work.requests], past, work.new, device)
        tokens = [request.tokens[request.done : request.done + work.new] for request in work.requests]
        self._cache.begin(view, step)
        with torch.no_grad():
            output = self.model(
                input_ids=torch.tensor(tokens, device=device),
                attention_mask=view.attention_mask(),
                position_ids=view.position_ids(),
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(self.model): self._cache},
            )
            self._cache.leave()
        for state, snapshot in snapshots:
            assert self.space.recurrent is not None
            self.memory.copy_block(self.space.recurrent, state, snapshot)
        self._cache.hand_off_states()
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _saves(self, work: Work) -> tuple[list[SaveOrder], list[tuple[int, int]]]:
        """Save orders of the blocks that are complete after this forward, and (running state, snapshot) pairs to copy.

        While the copies under way hold many blocks nothing new is saved, so that no request waits for a slow pool; what
        is still there is caught up with later.
        """
        saves: list[SaveOrder] = []
        snapshots: list[tuple[int, int]] = []
        if self.space.crowded:
            return saves, snapshots
        for request in work.requests:
            before, after = request.saved, request.done + work.new
            if not self._to_save(request, before, after):
                continue
            request.saved = after
            tables = request.tables
            snapshot = self.space.take_snapshot(tables, after) if self._snapshot_at(after) else None
            order = self.pool.save_order(
                request.id, request.tokens, before, after, tables.groups, request.params.extras
            )
            if order is not None:
                saves.append(order)
            if snapshot is not None and tables.state is not None:
                snapshots.append((tables.state, snapshot))
        return saves, snapshots

    def _to_save(self, request: Request, before: int, after: int) -> bool:
        size = self.settings.block_size
        wanted = request.params.save and (self.pool.config.save_decode_cache or after <= request.prompt_tokens)
        return wanted and after // size > before // size

    def _snapshot_at(self, tokens: int) -> bool:
        return self.space.recurrent is not None and tokens % self.settings.state_block == 0

    def _drop_snapshots(self, work: Work) -> None:
        """A snapshot lives on only as the source of its copy."""
        for request in work.requests:
            if self._snapshot_at(request.done + work.new):
                self.space.drop_snapshot(request.tables, request.done + work.new)

    def _settle(self, settled: Settled) -> None:
        outcomes: list[LoadOutcome | SaveOutcome] = [*settled.loads, *settled.saves]
        for outcome in outcomes:
            self.space.ended(outcome.id)
            if outcome.request in self._live:
                self._live[outcome.request].receipts.append(outcome)

    def _sampled(self, request: Request, logits: torch.Tensor) -> Output:
        """Choose the request's next token; its last one ends it."""
        params = request.params
        token = next_token(logits, params, request.generator)
        request.tokens.append(token)
        request.first_token_s = request.first_token_s or time.perf_counter()
        if params.logits:
            request.logits.append(logits.float().cpu())
        if token in params.stop:
            return Output(request.id, token, self._end(request, Finish.STOP))
        if len(request.tokens) - request.prompt_tokens == params.max_tokens:
            return Output(request.id, token, self._end(request, Finish.LENGTH))
        return Output(request.id, token)

    def _pushed(self, request: Request, reason: str) -> Output:
        """A request's push has ended: delivered, or not for that reason."""
        if reason:
            self.pool.abort(request.id)
        return Output(request.id, None, self._end(request, Finish.UNDELIVERED if reason else Finish.PUSHED, reason))

    def _end(self, request: Request, finish: Finish, reason: str = "") -> Result:
        self._schedule.remove(request)
        del self._live[request.id]
        self.pool.finish(request.id)
        return request.result(finish, reason)
