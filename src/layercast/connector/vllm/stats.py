"""What the pool did since vLLM last asked, and the Prometheus metrics made of it.

Counts are kept where all ranks' reports come together, on the scheduler side. Does not know requests or blocks.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from layercast.flow.orders import LoadOutcome, SaveOutcome, TierOutcome
from layercast.observe.receipts import MissReason

FULL_GRAPH_STEPS = "full_graph_steps_with_loads"
COUNTERS = {
    "transfers": ("outcome", "Loads, saves, disk reads and disk writes that have ended, on each rank"),
    "bytes": ("direction", "Payload bytes moved, added up over ranks"),
    "layers": ("direction", "Layers that loads and saves moved, added up over ranks"),
    "pieces": ("direction", "Copies that loads and saves took: adjacent bytes go as one"),
    "transfer_seconds": (
        "direction",
        "Seconds of each load from when its first bytes were handed over until its last have landed, waits between its "
        "layers among them; of each disk read or write, from its first file until its last; added up over ranks",
    ),
    "exposed_seconds": (
        "direction",
        "Seconds that a forward's thread waited at a layer for a load; nothing of loads that a GPU waited for alone",
    ),
    "swept_layers": ("direction", "Layers saved only after the forward, as no hook announced them"),
    FULL_GRAPH_STEPS: ("direction", "Forwards without layers' hooks (full graphs) that waited for all loads first"),
    "hit_tokens": ("tier", "Prompt tokens promised from the pool, which need not be computed"),
    "hits": ("mode", "Requests that were promised tokens from the pool, by the way these are loaded"),
    "misses": ("reason", "Requests for which nothing was loaded, by the reason"),
}
"""Counter (its name without "layercast_") to its label and what it counts."""
STAGING = "staging_bytes"
PEAKS = {STAGING: ("rank", "Most bytes of staging memory that copies have held at one time since the start")}
"""As `COUNTERS`, of what is not added up."""


class Stats(KVConnectorStats):
    """Counts: name to label to number."""

    def add(self, name: str, label: str, number: float = 1) -> None:
        """Count."""
        labels = self.data.setdefault(name, {})
        labels[label] = labels.get(label, 0) + number

    def ended(self, outcome: LoadOutcome | SaveOutcome) -> None:
        """Count a load or save that has ended on a rank."""
        direction = "load" if isinstance(outcome, LoadOutcome) else "save"
        self.add("bytes", direction, outcome.nbytes)
        self.add("layers", direction, outcome.layers)
        self.add("pieces", direction, outcome.pieces)
        if isinstance(outcome, LoadOutcome):
            self.add("transfers", f"load {outcome.end}")
            self.add("transfer_seconds", direction, outcome.transfer_s)
            if outcome.exposed_s is not None:
                self.add("exposed_seconds", direction, outcome.exposed_s)
        else:
            self.add("transfers", "saved" if outcome.saved else "save failed")
            self.add("swept_layers", direction, outcome.swept_layers)

    def tier_ended(self, outcome: TierOutcome) -> None:
        """Count what has come up from the tier below the slab, or gone down to it, on a rank."""
        direction = "disk read" if outcome.fetch else "disk write"
        self.add("transfers", direction if outcome.done else f"{direction} failed")
        self.add("bytes", direction, outcome.nbytes)
        self.add("transfer_seconds", direction, outcome.seconds)

    def staged(self, rank: int, nbytes: int) -> None:
        """Note the most staging memory that a rank has taken so far."""
        self.data.setdefault(STAGING, {})[str(rank)] = nbytes

    def looked_up(self, tokens: int, tier: str, mode: str, miss: MissReason | None) -> None:
        """Count what a request was promised, or why nothing."""
        if tokens:
            self.add("hit_tokens", tier, tokens)
            self.add("hits", mode)
        elif miss is not None:
            self.add("misses", miss.name.lower())

    def reset(self) -> None:
        """Forget."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        """Both together."""
        for name, labels in other.data.items():
            for label, number in labels.items():
                if name in PEAKS:
                    self.data.setdefault(name, {})[label] = number
                else:
                    self.add(name, label, number)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number each, for vLLM's log."""
        return {f"{name} {label}": number for name, labels in self.data.items() for label, number in labels.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class Metrics(KVConnectorPromMetrics):
    """The counters as `vllm:layercast_*` metrics, labelled by engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(f"vllm:layercast_{name}", help_, [*labelnames, label])
            for name, (label, help_) in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(f"vllm:layercast_{name}", help_, labelnames=[*labelnames, label])
            for name, (label, help_) in PEAKS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine has counted."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels in transfer_stats_data.items():
            for label, number in labels.items():
                if name in PEAKS:
                    self._gauges[name].labels(*engine, label).set(number)
                else:
                    self._counters[name].labels(*engine, label).inc(number)
