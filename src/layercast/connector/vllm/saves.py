"""Which blocks are saved in a step: whose requests complete some, as far as their tokens are known.

Does not know the pool's room, copies, or what holds the blocks meanwhile.
"""

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from layercast.connector.vllm.due import table_to_save
from layercast.connector.vllm.rota import Rota
from layercast.connector.vllm.tracked import Tracked
from layercast.connector.vllm.versions import Tables
from layercast.control.scheduler import SchedulerSide
from layercast.flow.orders import SaveOrder
from layercast.spec.groups import GroupKind

LUMP = 64
"""Generated blocks that are saved together where none can leave a window before its turn; what is left, at the end.
Lumps of a request end where its name says, so that requests that run in step are not all saved in one step."""


class _Few(NamedTuple):
    """Tokens [before, after) of a request, which lie in these blocks unless it has been preempted since."""

    known: Tracked
    before: int
    after: int
    block_ids: Sequence[Sequence[int]]
    preemptions: int

    @property
    def there(self) -> bool:
        """Whether they do: it has not lost its blocks, nor been rewound to compute them again."""
        request = self.known.request
        return request.num_preemptions == self.preemptions and request.num_computed_tokens >= self.after


class Saves:
    """Saves of one engine's requests.

    most_a_step: tokens that a request which generates gains in a step, at most. overlapped: whether the next step is
    scheduled while this one computes. Then few blocks are looked for and saved with that one: before its own forward
    this would cost the first token as much as after it.
    """

    def __init__(self, side: SchedulerSide, tables: Tables, most_a_step: int, *, overlapped: bool) -> None:
        self._side = side
        self._tables = tables
        self._most_a_step = most_a_step
        self._rota = Rota()
        self.grain = min(spec.block_size for spec in side.specs)
        """Tokens of the smallest block."""
        self._lump = LUMP if all(spec.kind is GroupKind.FULL for spec in side.specs) else 1
        self._few = LUMP if overlapped and self._lump > 1 else 0
        self._behind: dict[str, _Few] = {}
        """By request, what its last step has completed where that is few blocks."""

    def step(self, output: SchedulerOutput, tracked: Mapping[str, Tracked]) -> Iterator[SaveOrder]:
        """Orders of the blocks that a step completes, and of the few that the last one did."""
        behind, self._behind = self._behind, {}
        for few in behind.values():
            if few.there and (order := self._order(few.known, few.before, few.after, few.block_ids, ())) is not None:
                yield order
        for new in output.scheduled_new_reqs:
            self._rota.always(new.req_id)
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            self._rota.always(name)
        scheduled = output.num_scheduled_tokens
        for name in self._rota.begin(scheduled):
            known = tracked.get(name)
            if known is None or not known.save:
                self._rota.drop(name)
            elif (order := self._look(known, scheduled[name])) is not None:
                yield order

    def last(self, known: Tracked, block_ids: Sequence[Sequence[int]]) -> SaveOrder | None:
        """What is left to save of a request that has ended. block_ids: its blocks, by group."""
        computed = known.request.num_computed_tokens
        return self._order(known, computed, computed, block_ids, ())

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._rota.drop(request)
        self._behind.pop(request, None)

    def doubt(self, failed: Collection[str]) -> None:
        """Requests have read what had not been loaded: of what their forward has computed nothing more is saved."""
        if failed:
            self._behind.clear()

    def _look(self, known: Tracked, tokens: int) -> SaveOrder | None:
        """What a scheduled request completes. Generated blocks are saved some at a time."""
        request, order = known.request, None
        name, before = request.request_id, request.num_computed_tokens
        after = before + tokens
        end, lump = min(after, request.num_tokens), self._lump if before >= request.num_prompt_tokens else 1
        complete, saved = end // self.grain, min(known.saved, before) // self.grain
        shift = zlib.crc32(name.encode()) % self._lump
        if (complete + shift) // lump > (saved + shift) // lump:
            if complete - saved <= self._few:
                table = self._tables.of(name)  # now, as a step tells of those alone that it schedules
                self._behind[name] = _Few(known, before, after, table, request.num_preemptions)
            else:
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
        return self._side.save_order(request.request_id, request.all_token_ids, start, end, tables, known.extras)
