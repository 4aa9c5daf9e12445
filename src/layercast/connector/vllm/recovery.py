"""A request whose load failed inside a forward starts again, in vLLM's own scheduler.

vLLM rewinds such a request where it stands. But its second model runner keeps positions on the device and never hears
of that, and under async scheduling the token of the step in flight is delivered, computed from what had not been
loaded. So here the request is preempted, which every runner knows, as vLLM does when it resets its prefix cache: what
is in flight is dropped, and what was made of the lost blocks leaves the prefix cache.
Does not know slots, leases or why a load failed.
"""

import functools
import inspect
import time
from collections.abc import Mapping

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

_DROPS_STALE = "drop_stale_output" in inspect.signature(Scheduler._preempt_request).parameters
_DISCARDS = "async_tokens_to_discard" in inspect.getsource(Request.__init__)
AVAILABLE = _DROPS_STALE or _DISCARDS
"""Whether this version knows a token in flight that is not to be delivered."""


def install() -> None:
    """Have the schedulers of this process restart such requests. Repeats change nothing."""
    rewind = Scheduler._handle_invalid_blocks
    if getattr(rewind, "restarts", False):
        return

    @functools.wraps(rewind)
    def restarting(self: Scheduler, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        failed = rewind(self, invalid_block_ids, num_scheduled_tokens)
        if self.recompute_kv_load_failures:
            _restart(self, failed, invalid_block_ids, num_scheduled_tokens)
        return failed

    restarting.restarts = True  # type: ignore[attr-defined]
    Scheduler._handle_invalid_blocks = restarting


def drop_in_flight(request: Request) -> None:
    """Deliver nothing of what a preempted request has in flight."""
    if _DROPS_STALE:
        request.drop_stale_output = True
    elif request.num_output_placeholders:  # none: there is nothing, or it was dropped when the request was restarted
        request.async_tokens_to_discard = int(not request.is_prefill_chunk)
        request.num_output_placeholders = 0


def _restart(scheduler: Scheduler, failed: set[str], lost: set[int], ended: Mapping[str, int]) -> None:
    """Preempt the running requests in `failed`. ended: tokens of each request in the step that is being settled."""
    again = [request for request in scheduler.running if request.request_id in failed]
    scheduler.running = [request for request in scheduler.running if request.request_id not in failed]
    for request in reversed(again):  # each goes to the head of the queue
        name = request.request_id
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(name)
        first = next(at for at, block in enumerate(blocks) if block in lost)
        scheduler.kv_cache_manager.evict_blocks(set(blocks[first:]))
        if _DROPS_STALE:
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        else:
            in_flight = request.num_in_flight_tokens > ended.get(name, 0)
            scheduler._preempt_request(request, time.monotonic())
            request.async_tokens_to_discard = int(in_flight and not request.is_prefill_chunk)
            request.num_output_placeholders = 0
        scheduler.prev_step_scheduled_req_ids.discard(name)
