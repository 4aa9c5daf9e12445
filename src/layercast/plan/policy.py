"""The decision on a hit: compute its tokens again, load it in bulk, or load it layer by layer. Pure.

Does not know which tier the bytes are on, nor how they move.
"""

from enum import StrEnum

import msgspec


class Mode(StrEnum):
    """What becomes of a hit."""

    RECOMPUTE = "recompute"
    BULK = "bulk"
    LAYERWISE = "layerwise"


class Decision(msgspec.Struct, frozen=True):
    """window: layers moved together as in LoadOrder, 0 = all. reason: for the receipt."""

    mode: Mode
    window: int
    reason: str


class Estimate(msgspec.Struct, frozen=True):
    """What is known of costs: the link's bytes a second, and seconds to compute the hit's tokens again."""

    link_bytes_per_s: float
    recompute_s: float


def decide(
    hit_tokens: int,
    *,
    threshold: int,
    use_layerwise: bool,
    window: int,
    layers: int,
    nbytes: int = 0,
    estimate: Estimate | None = None,
) -> Decision:
    """What to do with a hit of that many tokens, whose KV has `nbytes` bytes over `layers` layers."""
    if hit_tokens < max(1, threshold):
        return Decision(Mode.RECOMPUTE, 0, f"a hit of {hit_tokens} tokens is below the threshold of {threshold}")
    if estimate is not None and nbytes > estimate.link_bytes_per_s * estimate.recompute_s:
        return Decision(Mode.RECOMPUTE, 0, f"computing takes {estimate.recompute_s:.3g} s, loading would take longer")
    if not use_layerwise:
        return Decision(Mode.BULK, 0, "layerwise is off")
    if window >= layers:
        return Decision(Mode.BULK, 0, f"a window of {window} holds all {layers} layers")
    return Decision(Mode.LAYERWISE, window, f"windows of {window} of {layers} layers")
