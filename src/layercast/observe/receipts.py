"""One receipt per request: what moved, how much of it the forward waited for, or why nothing was loaded.

Plain values that others fill in. Does not know keys, stores, engines or where a receipt is kept.
"""

import re
from collections.abc import Iterable
from enum import StrEnum

import msgspec

HOST, DISK = "host", "disk"
"""Tiers that KV is loaded from: the slab, and what came up to it from a folder for this request."""


class MissReason(StrEnum):
    """Why a request's KV was computed rather than loaded; the value is the sentence a user reads."""

    NEVER_STORED = "no block of this prompt was ever saved"
    NEVER_UNDER_SALT = "no block of this prompt was ever saved under this salt"
    HELD = "the engine itself still held what the pool has of it"
    NO_ROOM = "there was no room to save it; raise host_bytes"
    SAVING = "it was still being saved"
    TOO_LITTLE = "the pool has too little of it to go on from"
    EVICTED = "its blocks were evicted to make room; raise host_bytes"
    SHORT = "but for its last token, which is always computed, the prompt is shorter than one block"
    BELOW_THRESHOLD = "the hit is shorter than kv_recompute_threshold, so it was recomputed"
    FASTER = "to compute it took less time than to load it"
    TIMED_OUT = "a layer did not arrive within layer_wait_ms"
    CORRUPT = "a layer's digest differed from the one taken at saving"
    LOST = "its blocks were lost between the promise and the load"
    STOPPED = "the pool has stopped, as the log says; restart the engine"
    NOT_CACHEABLE = "the prompt holds content that no key can name"
    DECLINED = "the request asked not to load"
    UNREADABLE = 'what the request asks under "layercast" can not be read, so it is neither loaded nor saved'
    PRODUCER = "this engine saves and does not load (kv_role is kv_producer)"
    ABORTED = "the request ended before its load"


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one request's KV.

    Tokens: prompt = computed + held + loaded; held: those that vLLM's own prefix cache held. nbytes: payload that moved
    over `layers` layers. mode: how it was loaded, in windows of `window` layers (0 = all); reason: why so, or why it
    was computed. transfer_s: from the first byte to the last one's landing; exposed_s: the part of it that the forward
    waited for, None = not known, as where a GPU waits by itself; both in seconds. verified: every landed layer's digest
    was compared and equal.
    """

    request: str
    prompt_tokens: int
    computed_tokens: int
    held_tokens: int = 0
    loaded_tokens: int = 0
    nbytes: int = 0
    layers: int = 0
    layout: str = ""
    tier: str = ""
    mode: str = ""
    window: int = 0
    reason: str = ""
    transfer_s: float = 0.0
    exposed_s: float | None = 0.0
    verified: bool = False
    miss: MissReason | None = None
    detail: str = ""

    @property
    def overlap(self) -> float | None:
        """Part of the transfer hidden behind compute, 0 to 1; None where there was none, or it is not known."""
        return overlap(self.transfer_s, self.exposed_s)

    @property
    def sentence(self) -> str:
        """The receipt as one line of plain words."""
        head = f"{self.request}: {self.prompt_tokens} prompt tokens, {self.computed_tokens} computed"
        head += f", {self.held_tokens} held by vLLM itself" if self.held_tokens else ""
        if self.miss is not None:
            tail = f"nothing loaded: {self.miss}"
        elif self.loaded_tokens:
            check = ("" if self.verified else "not ") + "verified"
            share = "not known how much" if self.overlap is None else f"{self.overlap:.0%}"
            hidden = f", {share} hidden behind compute" if self.transfer_s > 0 else ""
            how = f", {self.mode}" if self.mode else ""
            moved = f"{self.nbytes:,} bytes, {self.layers} layers{hidden}, {check}"
            tail = f"{self.loaded_tokens} loaded from {self.tier}{how} ({moved})"
        else:
            tail = "nothing loaded"
        return f"{head}, {tail}" + (f" ({self.detail})" if self.detail else "")


RECEIPT = re.compile(r"\breceipt (\{.*\})")
"""How a receipt appears in a log line."""


def receipts_in(lines: Iterable[str], request: str) -> list[Receipt]:
    """The receipts of a log whose request's name begins with `request`, in order; other lines are passed over."""
    found = []
    for line in lines:
        match = RECEIPT.search(line)
        if match is None:
            continue
        try:
            receipt = msgspec.json.decode(match[1], type=Receipt)
        except msgspec.MsgspecError:
            continue
        if receipt.request.startswith(request):
            found.append(receipt)
    return found


def overlap(transfer_s: float, exposed_s: float | None) -> float | None:
    """1 - exposed / transfer, kept within 0 to 1; None for a transfer that took no time, or where one is not known."""
    if transfer_s <= 0 or exposed_s is None:
        return None
    return min(1.0, max(0.0, 1.0 - exposed_s / transfer_s))


def total(times: Iterable[float | None]) -> float | None:
    """Their sum; None where one is not known."""
    known = 0.0
    for time_s in times:
        if time_s is None:
            return None
        known += time_s
    return known
