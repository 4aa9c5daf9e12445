"""What loads and forwards have cost lately, and the policy with that knowledge.

Does not know requests, keys or tables. The clock is handed in.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from layercast.config import Config
from layercast.flow.orders import LoadEnd, LoadOutcome
from layercast.plan.policy import Company, Decision, Estimate, Hit, Rules, decide
from layercast.spec.groups import GroupSpec

_log = logging.getLogger("layercast")
KEPT = 32
LARGE = 64
"""Tokens from which on a forward's time tells the cost of a token."""
SEVERAL = 3
"""Of the largest forwards, so many are believed, where there are so many: one alone may have been the first of all."""
FORGET_S = 30.0
"""Where nothing has been loaded for so long, what loads cost is not known: so a slow spell is not for ever."""


class Rates:
    """The last loads and forwards."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._links: deque[float] = deque(maxlen=KEPT)
        """Bytes a second of each load."""
        self._last_load_s = 0.0
        self._large: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._small_s: deque[float] = deque(maxlen=KEPT)
        self._known: Estimate | None = None
        """What was last made of them, as long as it stands."""

    def loaded(self, nbytes: int, seconds: float) -> None:
        """A load has landed that took so long from its first byte to its last."""
        now = self._clock()
        if now - self._last_load_s > FORGET_S:
            self._links.clear()
        if nbytes and seconds > 0:
            self._links.append(nbytes / seconds)
            self._known = None
            self._last_load_s = now

    def computed(self, tokens: int, seconds: float) -> None:
        """A forward over so many new tokens, without loads inside it, took so long."""
        if tokens >= LARGE and seconds > 0:
            self._large.append((tokens, seconds))
            self._known = None
        elif tokens and seconds > 0:
            self._small_s.append(seconds)

    @property
    def estimate(self) -> Estimate | None:
        """The link at its best in the last loads, as one that queued behind others tells less; the least of the small
        forwards; the median cost of a token in the largest ones, beyond that; the median of the least large ones,
        which takes no longer than that of all. None: not known yet.

        A forward that takes less than twice the least of the small ones may have waited for its launches all the time:
        it tells no more than that a token costs at most all of it.
        """
        if not self._links or not self._large or self._clock() - self._last_load_s > FORGET_S:
            return None
        least_s = min(self._small_s, default=0.0)
        if self._known is None or self._known.forward_s != least_s:
            ordered = sorted(self._large)
            least, most = ordered[0][0], ordered[-SEVERAL:][0][0]
            short = median(seconds for tokens, seconds in ordered if tokens <= 2 * least)
            largest = [(tokens, seconds) for tokens, seconds in self._large if 2 * tokens >= most]
            costs = [(seconds - least_s * (seconds > 2 * least_s)) / tokens for tokens, seconds in largest]
            short = min(short, median(seconds for _, seconds in ordered))  # one alone may have been compiled
            self._known = Estimate(max(self._links), median(costs), least_s, (least, short))
        return self._known


class Chooser:
    """Decides on hits. block_bytes: of each group's block on a rank. in_forward, told_ahead: see `policy.Rules`."""

    def __init__(
        self,
        config: Config,
        specs: Sequence[GroupSpec],
        block_bytes: Sequence[int],
        in_forward: bool,
        told_ahead: int,
        clock: Callable[[], float],
    ) -> None:
        self.rates = Rates(clock)
        self.halted = ""
        """Why nothing is loaded or saved any more."""
        self._block_bytes = tuple(block_bytes) or (0,) * len(specs)
        self._rules = Rules(
            threshold=config.kv_recompute_threshold,
            use_layerwise=config.use_layerwise,
            window=config.layerwise_window,
            layers=sum(len(spec.layers) for spec in specs),
            exposed_s=config.layerwise_exposed_ms / 1000,
            in_forward=in_forward,
            told_ahead=told_ahead,
        )

    def heard(self, halted: str, loads: Iterable[LoadOutcome]) -> None:
        """A rank's report. Once a rank has halted, nothing is loaded or saved any more, which the log says once."""
        if halted and not self.halted:
            self.halted = halted
            _log.error("the pool has stopped, everything is computed: %s", halted)
        for load in loads:
            if load.end is LoadEnd.LANDED:
                self.rates.loaded(load.nbytes, load.transfer_s)

    def nbytes(self, needed: Sequence[Sequence[int]]) -> int:
        """Bytes of these blocks of each group."""
        return sum(len(blocks) * size for blocks, size in zip(needed, self._block_bytes, strict=True))

    def decide(self, hit: Hit, company: Company, estimate: Estimate | None) -> Decision:
        """What becomes of a hit."""
        return decide(hit, self._rules, company, estimate)
