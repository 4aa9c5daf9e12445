"""What the engine's forwards do, as far as the scheduler side asks: who runs, how long they take, what they wait for.

Does not know keys, blocks' content or what is decided.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from layercast.connector.vllm.tracked import Tracked
from layercast.connector.vllm.versions import Tables
from layercast.control.rates import Rates
from layercast.flow.orders import LoadOrder
from layercast.plan.policy import Company, Estimate


class Forwards:
    """The forward to come, and those under way: at most `depth`. most_tokens: that one takes."""

    def __init__(self, most_tokens: int, depth: int) -> None:
        self.most_tokens, self.depth = most_tokens, depth
        self.coming: dict[str, LoadOrder] = {}
        """Loads that were said to have come, and are not known to have ended on every rank, by live request."""
        self.reading: set[str] = set()
        """Loads that forwards read and that have not ended: what these forwards compute may yet prove wrong."""
        self.leaving: dict[str, Tracked] = {}
        """Requests that have ended while what became of their loads was still to be reported."""
        self.failed: set[Tracked] = set()
        """Those whose load has failed and who have not computed since."""
        self._readers: tuple[Mapping[str, Sequence[int]], bool] = {}, False
        """Blocks of who shares the last step with a load that has not ended, and whether it reads one that failed."""
        self._running: tuple[Mapping[str, int], set[str]] = {}, set()
        """Who is in the last step that was ordered, in vLLM's own record, as a copy would look at everybody who runs;
        and who of them has ended since."""
        self._nbytes = self._tokens = 0
        self._under_way: deque[tuple[float, int]] = deque(maxlen=depth)
        self._last_end_s = 0.0

    def read_by(
        self, scheduled: Collection[str], tracked: Mapping[str, Tracked], tables: Tables, *, misled: bool
    ) -> None:
        """A step is ordered: who computes again, and which blocks share its forward with a load that has not ended.

        misled: or with one that has failed, of which vLLM hears with this step's outcome.
        """
        if self.failed:
            self.failed = {known for known in self.failed if known.request.request_id not in scheduled}
        doubt = self.reading or misled
        self._readers = {name: tables.of(name)[0] for name in scheduled if name in tracked} if doubt else {}, misled

    def doubtful(self, request: str) -> Sequence[int]:
        """Blocks of a request whose last step may yet prove to have read what had not been loaded; none otherwise."""
        readers, misled = self._readers
        return readers.get(request, ()) if self.reading or misled else ()

    def company(self, request: str, costs: Estimate | None) -> Company:
        """Who shares the coming forward with a request that is about to be admitted, and when it can begin.

        costs: where its loads move while others are under way.
        """
        running, ended = self._running
        others, ahead_s = len(running) - len(ended) - (request in running and request not in ended), 0.0
        if costs is not None and self._under_way:
            since_s = max(self._under_way[0][0], self._last_end_s)
            ahead_s = sum(costs.compute_s(tokens) for _, tokens in self._under_way) - (time.monotonic() - since_s)
        return Company(others, self._nbytes, self._tokens + others, max(0.0, ahead_s))

    def admitted(self, nbytes: int, tokens: int) -> None:
        """The coming forward will wait for a load of so many bytes, and compute so many tokens behind it."""
        self._nbytes += nbytes
        self._tokens += tokens

    def left(self, request: str) -> None:
        """A request has ended."""
        running, ended = self._running
        if request in running:
            ended.add(request)

    def left_behind(self, request: str) -> list[str]:
        """The request, if a load of it was said to have come that no forward will join, as it is to have another.

        vLLM has rewound it, since it shares blocks with a load that has failed.
        """
        return [request] if self.coming.pop(request, None) is not None else []

    def misread(self, failed: Iterable[str], tracked: Mapping[str, Tracked]) -> list[str]:
        """Those of the requests whose loads have failed that have read these.

        A failure may be told a step late. One whose load no forward has waited for by then was preempted meanwhile and
        has dropped what it had read.
        """
        found = {name: known for name in failed if (known := tracked.get(name)) is not None}
        return [name for name, known in found.items() if known.loading is None or known.loading.id in self.reading]

    def began(self, scheduled: Mapping[str, int], loads: bool) -> None:
        """A step was ordered: tokens by request, and whether it waits for loads (then its time says nothing)."""
        if scheduled:
            self._running = scheduled, set()
        self._nbytes = self._tokens = 0
        self._under_way.append((time.monotonic(), 0 if loads else sum(scheduled.values())))

    def ended(self, rates: Rates) -> None:
        """The oldest step under way has ended. It began no earlier than the one before it had ended."""
        if not self._under_way:
            return
        start_s, tokens = self._under_way.popleft()
        start_s, self._last_end_s = max(start_s, self._last_end_s), time.monotonic()
        rates.computed(tokens, self._last_end_s - start_s)
