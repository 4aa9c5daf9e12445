"""Which requests run in the next forward: one chunk of one prompt, or one token of every running request.

First come, first served; prompts and answers take turns; when blocks run out, the youngest request gives its own back
and starts over later. Does not know models, tensors or sampling.
"""

from bisect import insort
from dataclasses import dataclass

from layercast.connector.transformers.requests import Request
from layercast.connector.transformers.space import BlockSpace
from layercast.control.pool import Pool
from layercast.errors import Full
from layercast.flow.orders import LoadOrder, ReceiveOrder
from layercast.observe.receipts import DISK, HOST, MissReason


@dataclass(frozen=True, slots=True)
class Work:
    """One forward: `new` tokens of each request. load, receive: what lands in the (only) request's blocks meanwhile."""

    requests: tuple[Request, ...]
    new: int
    load: LoadOrder | None = None
    receive: ReceiveOrder | None = None


class Scheduler:
    """The queue, the request whose prompt is being run, and those that answer."""

    def __init__(self, space: BlockSpace, pool: Pool, chunk: int, max_batch: int) -> None:
        self._space = space
        self._pool = pool
        self._chunk = chunk
        self._max_batch = max_batch
        self._waiting: list[Request] = []
        self._receiving: list[Request] = []
        self._sending: list[Request] = []
        """Prefilled; their push has not ended yet."""
        self._prefilling: Request | None = None
        self._running: list[Request] = []
        self._prefill_next = True
        self._waited = False
        """Whether the last look found nothing to run."""

    def add(self, request: Request) -> None:
        """Queue a request in order of arrival."""
        insort(self._waiting, request, key=lambda waiting: waiting.arrival)

    def expect(self, request: Request) -> None:
        """Allocate blocks for a request whose tokens but the last one will be pushed here. Raises Full."""
        tokens = len(request.tokens)
        if not self._space.grow(request.tables, tokens - 1, tokens):
            raise Full(f"{request.id}: no room for {tokens} tokens now; finish or abort other requests first")
        request.promised(tokens - 1)
        request.tier, request.window = "peer", 1
        self._receiving.append(request)

    def arriving(self) -> Request | None:
        """The oldest request whose push has not begun to arrive."""
        return self._receiving[0] if self._receiving else None

    def next(self) -> Work | None:
        """The next forward, its blocks allocated; None when nothing can run until pending copies have ended."""
        turns = (self._prefill, self._decode) if self._prefill_next else (self._decode, self._prefill)
        work = turns[0]() or turns[1]()
        self._prefill_next = work is None or work.requests[0] is not self._prefilling
        self._waited = work is None
        return work

    @property
    def busy(self) -> bool:
        """Whether some request is in the middle of its prompt or answer."""
        return bool(self._holders)

    def ran(self, work: Work) -> None:
        """The forward was good: count it, and let go of what no later query sees."""
        for request in work.requests:
            request.ran(request.done + work.new)
            self._space.trim(request.tables, request.done)
        if self._prefilling is not None and self._prefilling.remaining == 0:
            if self._prefilling.until is None:
                self._running.append(self._prefilling)
            else:
                self._sending.append(self._prefilling)
                self._space.free(self._prefilling.tables)  # its parts under way are held
            self._prefilling = None

    def broken(self, request: Request) -> None:
        """The request's load failed: start over without it. Its blocks are held until the load's copies have ended."""
        self.remove(request)
        request.broken()
        self.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and let go of its blocks."""
        if request is self._prefilling:
            self._prefilling = None
        else:
            queues = (self._running, self._receiving, self._sending, self._waiting)
            next(queue for queue in queues if request in queue).remove(request)
        self._space.free(request.tables)

    def _prefill(self) -> Work | None:
        request = self._prefilling
        if request is None:
            return self._received() or self._admit()
        end = self._chunk_end(request.done, request.end)
        if not self._space.grow(request.tables, request.done, end):
            return None
        return Work((request,), end - request.done)

    def _received(self) -> Work | None:
        """Start the first request whose push has begun to arrive: its last token runs while the rest lands."""
        request = next((one for one in self._receiving if one.arriving is None or one.arriving.done), None)
        if request is None or request.transfer is None or len(self._running) >= self._max_batch:
            return None
        self._receiving.remove(request)
        self._prefilling = request
        return Work((request,), 1, receive=ReceiveOrder(request.transfer, request.id, request.done))

    def _admit(self) -> Work | None:
        """Start the first request in the queue, with what the pool has of its tokens."""
        if not self._waiting or len(self._running) >= self._max_batch:
            return None
        request = self._waiting[0]
        if request.load and self._pool.bringing(request.id, request.tokens[: request.end], request.params.extras):
            return None
        load = self._load(request) if request.load else None
        done = load.tokens if load else 0
        end = self._chunk_end(done, request.end)
        if load is None and not self._space.grow(request.tables, 0, end):
            return None
        self._waiting.pop(0)
        self._prefilling = request
        request.promised(done)
        return Work((request,), end - done, load)

    def _load(self, request: Request) -> LoadOrder | None:
        """The order that brings in what the pool has, its blocks and those of the first chunk allocated; or None."""
        match = self._pool.match(request.tokens[: request.end], request.params.extras)
        request.miss, request.window = match.miss, match.decision.window
        request.tier = DISK if self._pool.brought_up(request.id) else HOST
        end = self._chunk_end(match.tokens, request.end)
        if not match.tokens or not self._space.grow(request.tables, match.tokens, end, match.needed):
            return None
        recurrent = self._space.recurrent is not None
        if recurrent:  # the pool takes the entry behind the last block for the one that the state goes into
            self._space.set_snapshot(request.tables, match.tokens, request.tables.state)
        order = self._pool.load_order(request.id, match, request.tables.groups)
        if recurrent:
            self._space.set_snapshot(request.tables, match.tokens, None)
        if order is None:
            request.miss = MissReason.LOST
            self._space.free(request.tables)
        return order

    def _decode(self) -> Work | None:
        for request in list(self._running):
            while request in self._running and not self._space.grow(request.tables, request.done, request.done + 1):
                if self._space.pending and (not self._waited or self._holders == [request]):
                    return None  # blocks come back when the copies under way have ended: mostly at once
                self._preempt()
        return Work(tuple(self._running), 1) if self._running else None

    def _preempt(self) -> None:
        """The youngest request gives its blocks back and will run again from the start."""
        youngest = max(self._holders, key=lambda request: request.arrival)
        self.remove(youngest)
        youngest.rewound()
        self.add(youngest)

    @property
    def _holders(self) -> list[Request]:
        return [*self._running, self._prefilling] if self._prefilling else self._running

    def _chunk_end(self, start: int, tokens: int) -> int:
        """Where a chunk from `start` ends: on a block boundary, at every snapshot boundary, or at the last token."""
        end = start + self._chunk
        if self._space.recurrent is not None:
            spacing = self._space.specs[self._space.recurrent].block_size
            end = min(end, (start // spacing + 1) * spacing)
        return min(end, tokens)
