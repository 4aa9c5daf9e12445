"""What the pool has below its slab: which blocks of a prompt lie there, what to bring up for it, what to write behind.

Looks into the stores of all ranks on a thread of its own, so that no scheduler waits for a disk; everything else
belongs to the scheduler's thread. Does not know tokens' names, bytes, nor how they move.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass

from layercast.control.directory import Directory, Lease
from layercast.errors import DeadlineExceeded, Full, Missing
from layercast.flow.orders import KeyedSlots, TierOrder, TierOutcome
from layercast.plan.prefix import lengthening
from layercast.sidethread import SideThread
from layercast.spec.groups import GroupSpec
from layercast.store.base import Store

Keys = Sequence[Sequence[bytes]]

ORDER_BLOCKS = 16
"""Most blocks of a group in one order: what fails, fails alone, and what is written behind is soon let go of."""
SPILL_SHARE = 8
"""A part of the slab's slots: so many are kept at a time for what is written behind; the rest may be evicted first."""


@dataclass(slots=True, eq=False)
class _Search:
    """A look into the stores for one request. found: presence of each key, by group."""

    tokens: int
    keys: Keys
    found: "Future[list[list[bool]]]"


class Backing:
    """The stores of all ranks under one directory; without any it does nothing.

    least: fewest tokens that make a fetch worth it.
    """

    def __init__(self, directory: Directory, stores: Sequence[Store], specs: Sequence[GroupSpec], least: int) -> None:
        self.directory = directory
        self._stores = tuple(stores)
        self._specs = tuple(specs)
        self._least = least
        self._looking = SideThread("layercast-look")
        self._searches: dict[str, _Search] = {}
        self._fetches: dict[str, tuple[str, int]] = {}
        """Order, named after its reservation, to (request, ranks that have not ended it)."""
        self._spills: dict[str, tuple[Lease, int]] = {}
        """Order to (what keeps its slots, ranks that have not ended it)."""
        self._later: deque[tuple[str, Keys]] = deque()
        """(request, keys) of what is to be written behind, not kept from eviction yet."""
        self._fetched: dict[str, bool] = {}
        """Live request that was looked for, to whether something was brought up for it."""
        self._due: list[TierOrder] = []
        self._last: Future[list[list[bool]]] | None = None
        """The look that ends last."""

    @property
    def there(self) -> bool:
        """Whether there is anything below the slab."""
        return bool(self._stores)

    def retire(self) -> None:
        """Look for nothing more and write nothing more behind; what is on its way up will be dropped."""
        for store in self._stores:
            store.close()  # looks that have not begun end at once
        self._stores = ()
        self._searches.clear()
        self._later.clear()

    # ---- up ----

    def seek(self, request: str, keys: Keys, tokens: int) -> None:
        """Look for what the slab lacks of a prompt of `tokens`, whose keys are `keys` by group. Returns at once."""
        keys = [named[: (tokens - 1) // spec.block_size] for named, spec in zip(keys, self._specs, strict=True)]
        here = self._here(keys)
        if self.there and request not in self._searches and not all(map(all, here)):
            self._last = self._looking.submit(_look, self._stores, keys)
            self._searches[request] = _Search(tokens, keys, self._last)
            self._fetched[request] = False

    def seeking(self, request: str) -> bool:
        """Whether it is not known yet what the stores have for a request."""
        return request in self._searches

    @property
    def fetching(self) -> bool:
        """Whether blocks are on their way up."""
        return bool(self._fetches)

    @property
    def busy(self) -> bool:
        """Whether anything is looked for, to be ordered, or on its way up or down."""
        return bool(self._searches or self._due or self._fetches or self._spills)

    def fetched(self, request: str) -> bool:
        """Whether blocks were brought up for a request."""
        return self._fetched.get(request, False)

    def wait(self, timeout_s: float) -> None:
        """Block until all that was looked for is known. Raises DeadlineExceeded."""
        if wait([search.found for search in self._searches.values()], timeout_s).not_done:
            raise DeadlineExceeded(f"the stores below have not answered within {timeout_s:g} s")

    def forget(self, request: str) -> None:
        """The request has ended; what is on its way for it still comes."""
        self._searches.pop(request, None)
        self._fetched.pop(request, None)

    # ---- down ----

    def saved(self, request: str, keys: Keys) -> None:
        """Blocks have become visible in the slab: write them behind, a few at a time, if they are still there then."""
        if self.there:
            parts = _parts([range(len(named)) for named in keys])
            self._later += [
                (request, [[named[i] for i in indices] for named, indices in zip(keys, part, strict=True)])
                for part in parts
            ]
            self._spill()

    def _spill(self) -> None:
        """Order what is to be written behind, as long as what is kept for it is not too much."""
        limit = sum(self.directory.slots) // SPILL_SHARE
        kept = sum(len(slots) for lease, _ in self._spills.values() for slots in lease.slots)
        while self._later and (not self._spills or kept + sum(map(len, self._later[0][1])) <= limit):
            request, wanted = self._later.popleft()
            with suppress(Missing):  # evicted before its turn came: a disk that is too slow keeps less
                lease = self.directory.keep(request, wanted)
                kept += sum(map(len, wanted))
                self._order(lease.id, False, wanted, lease.slots)
                self._spills[lease.id] = lease, self.directory.ranks

    # ---- orders and outcomes ----

    def orders(self) -> tuple[TierOrder, ...]:
        """What the workers are to do next."""
        for request, search in [(name, one) for name, one in self._searches.items() if one.found.done()]:
            del self._searches[request]
            if search.found.exception() is None:
                self._fetch(request, search)
        due, self._due = tuple(self._due), []
        return due

    @property
    def waiting(self) -> bool:
        """Whether there is something to order now."""
        return bool(self._due) or any(search.found.done() for search in self._searches.values())

    @property
    def awaits_reports(self) -> bool:
        """Whether an order has not ended on every rank."""
        return bool(self._fetches or self._spills)

    def settle(self, outcomes: Sequence[TierOutcome], rank: int) -> None:
        """One rank has ended orders: what has come up on all of them is visible, what has gone down is let go of."""
        for outcome in outcomes:
            (self._came_up if outcome.fetch else self._went_down)(outcome, rank)

    def _came_up(self, outcome: TierOutcome, rank: int) -> None:
        request, left = self._fetches.pop(outcome.id)
        if left > 1:
            self._fetches[outcome.id] = request, left - 1
        if not (outcome.done and self.there):
            self.directory.revoke(outcome.id, rank)
        elif self.directory.commit(outcome.id, rank) and request in self._fetched:
            self._fetched[request] = True

    def _went_down(self, outcome: TierOutcome, rank: int) -> None:
        lease, left = self._spills.pop(outcome.id)
        if left > 1:
            self._spills[outcome.id] = lease, left - 1
        else:
            self.directory.release(lease)
            self._spill()

    def close(self, timeout_s: float) -> None:
        """End the thread; orders under way are the workers'. Raises DeadlineExceeded if a store does not answer."""
        self.retire()
        self._looking.close()
        if self._last is not None and wait([self._last], timeout_s).not_done:
            raise DeadlineExceeded(f"the stores below have not answered within {timeout_s:g} s")
        self._looking.join()

    def _here(self, keys: Keys) -> list[list[bool]]:
        """Whether the slab has each key, or will have, by group."""
        return [[*map(self.directory.has(group, coming=True), named)] for group, named in enumerate(keys)]

    def _fetch(self, request: str, search: _Search) -> None:
        """Order what lengthens the prefix that can be used, as far as the slab has room."""
        here = self._here(search.keys)
        wanted = lengthening(self._specs, here, search.found.result(), search.tokens, self._least)
        for part in _parts(wanted):
            try:
                reservation = self.directory.reserve(request, search.keys, [(indices, ()) for indices in part])
            except Full:
                return
            if reservation.blocks:
                self._order(reservation.id, True, reservation.keys, reservation.slots)
                self._fetches[reservation.id] = request, self.directory.ranks

    def _order(self, name: str, fetch: bool, keys: Keys, slots: Sequence[Sequence[int]]) -> None:
        blocks = tuple(
            KeyedSlots(group, tuple(named), tuple(taken))
            for group, (named, taken) in enumerate(zip(keys, slots, strict=True))
            if taken
        )
        self._due.append(TierOrder(name, fetch, blocks))


def _look(stores: Sequence[Store], keys: Keys) -> list[list[bool]]:
    """Presence in all stores, by group. On the thread that looks."""
    found = []
    for named in keys:
        here = [True] * len(named)
        for store in stores:
            here = [one and other for one, other in zip(here, store.present(named), strict=True)]
        found.append(here)
    return found


def _parts(indices: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Indices by group, cut so that no part has more than ORDER_BLOCKS of a group; earlier blocks come first."""
    most = max(map(len, indices), default=0)
    return [[group[at : at + ORDER_BLOCKS] for group in indices] for at in range(0, most, ORDER_BLOCKS)]
