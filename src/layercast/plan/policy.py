"""The decision on a hit: compute its tokens again, or load it, and how much of the load a forward may wait for. Pure.

A load inside a forward is seen by every request that shares the forward, so what they may wait for it is bounded; a
load in the background keeps its own request waiting, and nobody else. Does not know which tier the bytes are on, nor
how they move, nor how costs were measured.
"""

from enum import StrEnum

import msgspec


class Mode(StrEnum):
    """What becomes of a hit."""

    RECOMPUTE = "recompute"
    BULK = "bulk"
    """One window of all layers, inside the forward."""
    LAYERWISE = "layerwise"
    """Window by window, inside the forward."""
    BACKGROUND = "background"
    """Before the forward, which starts once everything is there."""
    BACKGROUND_LAYERWISE = "background, then layerwise"
    """Before the forward until the rest will hide behind it, and the rest inside it."""


class Decision(msgspec.Struct, frozen=True):
    """window: layers moved together as in LoadOrder, 0 = all. reason: for the receipt.

    hidden_bytes: as in LoadOrder; only a load in two parts has any: what comes while the forwards under way run, behind
    the one that reads it, or in the time that others may wait.
    """

    mode: Mode
    window: int
    reason: str
    hidden_bytes: int = 0

    @property
    def parked(self) -> bool:
        """Whether the request waits in the background while its KV comes."""
        return self.mode in (Mode.BACKGROUND, Mode.BACKGROUND_LAYERWISE)


NO_HIT = Decision(Mode.RECOMPUTE, 0, "nothing to load")


class Hit(msgspec.Struct, frozen=True):
    """Tokens that can be loaded, the bytes of their KV, and the prompt's tokens behind them that one forward takes."""

    tokens: int
    nbytes: int = 0
    rest: int = 1


class Company(msgspec.Struct, frozen=True):
    """Who shares the coming forward: running requests; bytes that it loads and tokens that it computes for others,
    those of the running ones included; seconds until it can begin, while loads move already."""

    running: int = 0
    nbytes: int = 0
    tokens: int = 0
    ahead_s: float = 0.0


ALONE = Company()


class Rules(msgspec.Struct, frozen=True):
    """What is allowed.

    threshold: fewer tokens are recomputed; 0: every hit is loaded, whatever it costs. in_forward: whether the engine
    recovers from a load that fails inside a forward. exposed_s: most seconds that such a load may cost others.
    told_ahead: forwards that run between the word that a load has come and the first one that can read it.
    """

    threshold: int
    use_layerwise: bool
    window: int
    layers: int
    exposed_s: float
    in_forward: bool = True
    told_ahead: int = 1


class Estimate(msgspec.Struct, frozen=True):
    """What things cost: the link's bytes a second, seconds that a token adds to a forward, those of a small one.

    short: tokens and seconds of a forward over the end of a prompt. It may wait for its launches rather than compute.
    """

    link_bytes_per_s: float
    token_s: float
    forward_s: float
    short: tuple[int, float] = (1, 0.0)

    def transfer_s(self, nbytes: int) -> float:
        """Seconds that so many bytes take."""
        return nbytes / self.link_bytes_per_s

    def compute_s(self, tokens: int) -> float:
        """Seconds of a forward over so many new tokens: with fewer of them than another it takes no longer, and with
        more of them a token costs no more."""
        least, seconds = self.short
        return max(self.forward_s + tokens * self.token_s, seconds * min(1.0, tokens / least))


def decide(hit: Hit, rules: Rules, company: Company = ALONE, estimate: Estimate | None = None) -> Decision:
    """What to do with a hit. Without an estimate nothing is held back, but running requests wait for nothing."""
    if hit.tokens < max(1, rules.threshold):
        return Decision(Mode.RECOMPUTE, 0, f"a hit of {hit.tokens} tokens is below the threshold of {rules.threshold}")
    decision = _loaded(hit, rules, company, estimate)
    if estimate is None or not rules.threshold:
        return decision
    loading = _answer_s(hit, decision, rules, company, estimate)
    alone_s = company.ahead_s + estimate.compute_s(company.tokens + hit.tokens + hit.rest)
    computing = max(estimate.transfer_s(company.nbytes), alone_s)
    if loading > computing:
        reason = f"computing all of it takes {_ms(computing)}, with a load ({decision.mode}) {_ms(loading)}"
        return Decision(Mode.RECOMPUTE, 0, reason)
    return decision


def _loaded(hit: Hit, rules: Rules, company: Company, estimate: Estimate | None) -> Decision:
    """How to load it."""
    mode, window, why = Mode.LAYERWISE, rules.window, f"windows of {rules.window} of {rules.layers} layers"
    if not rules.use_layerwise:
        mode, window, why = Mode.BULK, 0, "layerwise is off"
    elif rules.window >= rules.layers:
        mode, window, why = Mode.BULK, 0, f"a window of {rules.window} holds all {rules.layers} layers"
    if not rules.in_forward:
        return Decision(Mode.BACKGROUND, window, "this engine can't recover from a load that fails inside a forward")
    if not company.running:
        return Decision(mode, window, f"{why}; nobody else is running")
    if estimate is None:
        return Decision(Mode.BACKGROUND, window, f"{company.running} others are running and costs are not known yet")
    transfer_s = estimate.transfer_s(company.nbytes + hit.nbytes)
    hidden_s = estimate.compute_s(company.tokens + hit.rest) if mode is Mode.LAYERWISE else 0.0
    exposed_s = max(0.0, transfer_s - company.ahead_s - hidden_s)
    sees = f"{company.running} others running would wait {_ms(exposed_s)} of {_ms(rules.exposed_s)} allowed"
    if exposed_s <= rules.exposed_s:
        return Decision(mode, window, f"{why}; {sees}")
    behind = int(estimate.link_bytes_per_s * hidden_s) - company.nbytes
    if behind * rules.layers < hit.nbytes * window or not window:  # not one window would hide
        return Decision(Mode.BACKGROUND, window, sees)
    before_s = rules.told_ahead * estimate.forward_s + rules.exposed_s
    hidden = min(hit.nbytes, behind + int(estimate.link_bytes_per_s * before_s))
    return Decision(Mode.BACKGROUND_LAYERWISE, window, f"{sees}; the last {hidden} bytes may come later", hidden)


def _answer_s(hit: Hit, decision: Decision, rules: Rules, company: Company, estimate: Estimate) -> float:
    """Seconds to the first token with that load, whose bytes come behind those that the coming forward loads.

    A request that was parked waits for the forwards under way, and is not in the coming one.
    """
    transfer_s = estimate.transfer_s(company.nbytes + hit.nbytes)
    rest_s = estimate.compute_s(hit.rest if decision.parked else company.tokens + hit.rest)
    before_s = rules.told_ahead * estimate.forward_s if decision.parked else company.ahead_s
    if decision.mode in (Mode.LAYERWISE, Mode.BACKGROUND_LAYERWISE):
        return max(transfer_s, before_s + rest_s)
    return (before_s + transfer_s if decision.parked else max(before_s, transfer_s)) + rest_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
