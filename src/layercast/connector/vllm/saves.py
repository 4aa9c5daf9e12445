"""Which blocks are saved in a step: whose requests complete some, as far as their tokens are known.

Does not know the pool's room, copies, or what holds the blocks meanwhile.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm.v1.core.sched.output import SchedulerOutput

from layercast.connector.vllm.due import table_to_save
from layercast.connector.vllm.rota import Rota
from layercast.connector.vllm.tracked import Tracked
from layercast.connector.vllm.versions import Tables
from layercast.control.scheduler import SchedulerSide
from layercast.flow.orders import SaveOrder
from layercast.spec.groups import GroupKind

LUMP = 64
"""Blocks of an answer that are saved together where none can leave a window before its turn; what is left, at the end.
Lumps of a request end where its name says, so that requests that run in step are not all saved in one step."""
COMPANY = 32
"""For each so many requests in a step, a few blocks may wait a step more for others to be handed over with."""


class Saves:
    """Saves of one engine's requests. most_a_step: tokens that a request which generates gains in a step, at most."""

    def __init__(self, side: SchedulerSide, tables: Tables, most_a_step: int) -> None:
        self._side = side
        self._tables = tables
        self._most_a_step = most_a_step
        self._rota = Rota()
        self.grain = min(spec.block_size for spec in side.specs)
        """Tokens of the smallest block."""
        self._lump = LUMP if all(spec.kind is GroupKind.FULL for spec in side.specs) else 1

    def step(self, output: SchedulerOutput, tracked: Mapping[str, Tracked], busy: bool) -> Iterator[SaveOrder]:
        """Orders of the blocks that a step completes. busy: whether a few blocks may wait for others."""
        for new in output.scheduled_new_reqs:
            self._rota.always(new.req_id)
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            self._rota.always(name)
        scheduled = output.num_scheduled_tokens
        for name in self._rota.begin(scheduled):
            known = tracked.get(name)
            if known is None or not known.save:
                self._rota.drop(name)
            elif (order := self._look(known, scheduled[name], busy)) is not None:
                yield order

    def patience(self, running: int, free: int) -> int:
        """Steps that a few blocks may wait for others: none where a block may leave its window meanwhile, nor as many
        as it takes vLLM to hand out its free blocks, among which are those of who has ended."""
        return min(running // COMPANY, free // max(1, running)) if self._lump > 1 else 0

    def last(self, known: Tracked, block_ids: Sequence[Sequence[int]]) -> SaveOrder | None:
        """What is left to save of a request that has ended. block_ids: its blocks, by group."""
        computed = known.request.num_computed_tokens
        return self._order(known, computed, computed, block_ids, ())

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._rota.drop(request)

    def _look(self, known: Tracked, tokens: int, busy: bool) -> SaveOrder | None:
        """What a scheduled request completes. Generated blocks are saved some at a time.

        So are a few at the end of a prompt that begins with what was there already, or, in a step that is busy, of any:
        they are this request's own, and to look for them, hand them over and hear of them costs a forward more than it
        costs others to miss them; who shares the engine finds them in its own cache.
        """
        request, order = known.request, None
        name, before = request.request_id, request.num_computed_tokens
        after = before + tokens
        end, lump = min(after, request.num_tokens), self._lump if before >= request.num_prompt_tokens else 1
        complete, saved = end // self.grain, min(known.saved, before) // self.grain
        shift = zlib.crc32(name.encode()) % self._lump
        held, prompt = known.local + known.promised, request.num_prompt_tokens
        few = self._lump > 1 and prompt // self.grain - held // self.grain <= self._lump
        own = few and (held or busy) and held <= before < prompt  # else all is new, or some is computed again
        if (complete + shift) // lump > (saved + shift) // lump and not own:
            order = self._order(known, before, after, self._tables.of(name), self._tables.snapshots(name))
        if after >= request.num_tokens:  # else more of the prompt, or of what was preempted, comes with the next step
            if self._side.config.save_decode_cache:
                missing = (complete + self._lump - (complete + shift) % self._lump) * self.grain - end
                self._rota.later(name, missing // self._most_a_step)
            else:
                self._rota.drop(name)
        return order

    def _order(
        self,
        known: Tracked,
        before: int,
        after: int,
        block_ids: Sequence[Sequence[int]],
        snapshots: Iterable[tuple[int, int, int]],
    ) -> SaveOrder | None:
        """The save of blocks that are complete after a step and whose tokens are known; drafts never are."""
        request, decoded = known.request, self._side.config.save_decode_cache
        start = min(known.saved, before)
        end = min(after, request.num_tokens if decoded else request.num_prompt_tokens)
        if not known.save or end // self.grain <= start // self.grain:
            return None
        known.saved = end
        tables = [table_to_save(spec, group, block_ids, snapshots) for group, spec in enumerate(self._side.specs)]
        return self._side.save_order(request.request_id, known.tokens, start, end, tables, known.extras)
