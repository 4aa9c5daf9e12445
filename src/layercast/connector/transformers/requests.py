"""What is asked of the engine, what it answers, and a request's state in between. Does not know blocks' content."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral

import msgspec
import torch

from layercast.connector.transformers.space import BlockTables
from layercast.errors import Refused
from layercast.flow.orders import LoadEnd, LoadOutcome, SaveOutcome
from layercast.move.base import Flight
from layercast.observe.receipts import HOST, MissReason, Receipt, total
from layercast.spec.keys import ExtrasOf


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer one prompt.

    temperature 0 is greedy. stop: token ids that end the answer (kept as its last token). logits: keep those that each
    token was chosen from. load, save: whether the pool may be used. extras: what else the KV depends on, by block (of
    the engine's block_size), for its keys.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()
    logits: bool = False
    load: bool = True
    save: bool = True
    extras: ExtrasOf | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise Refused(f"max_tokens = {self.max_tokens}: ask for at least one token")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise Refused(
                f"temperature = {self.temperature}, top_p = {self.top_p}: need temperature >= 0 and 0 < top_p <= 1"
            )


class Finish(StrEnum):
    """Why a request ended. A push has been delivered once its receiver has checked every layer."""

    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"
    PUSHED = "pushed"
    UNDELIVERED = "undelivered"


def refuse_other_than_ids(prompt: object) -> None:
    """Raises Refused, with what to pass instead, for a prompt that is no sequence of token ids."""
    if isinstance(prompt, str):
        raise Refused("a prompt is token ids, not text: pass tokenizer(text)['input_ids']")
    if isinstance(prompt, Integral):
        raise Refused("prompts are a list of lists of token ids: pass [ids] for one prompt")
    if not isinstance(prompt, Sequence) or not all(isinstance(token, (int, Integral)) for token in prompt):
        raise Refused(
            f"a prompt is a sequence of token ids, not {type(prompt).__name__}: a tokenizer's answer has them in "
            "['input_ids'], a tensor or array gives them by .tolist(), one list for each prompt"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request.

    computed_tokens: prompt tokens that ran through the model for it; with loaded_tokens they are the whole prompt.
    recomputed_tokens: tokens run once more, after a failed load or a preemption. receipts: of its copies.
    receipt: what was loaded and how well that was hidden, or why nothing was, and why a push was not delivered.
    logits: `[tokens, vocabulary]` fp32.
    """

    request: str
    tokens: tuple[int, ...]
    finish: Finish
    prompt_tokens: int
    computed_tokens: int
    loaded_tokens: int
    recomputed_tokens: int
    ttft_s: float
    preemptions: int
    receipts: tuple[LoadOutcome | SaveOutcome, ...]
    receipt: Receipt
    logits: torch.Tensor | None


_WHY = {
    LoadEnd.CORRUPT: MissReason.CORRUPT,
    LoadEnd.LATE: MissReason.TIMED_OUT,
    LoadEnd.LOST: MissReason.LOST,
    LoadEnd.ABORTED: MissReason.ABORTED,
}


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought a request: a token, and its result if it was the last."""

    request: str
    token: int | None
    result: Result | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A request under way. `done`: tokens whose KV lies in its blocks (or is being loaded into them)."""

    id: str
    arrival: int
    prompt_tokens: int
    tokens: list[int]
    params: Params
    generator: torch.Generator
    tables: BlockTables
    load: bool
    done: int = 0
    until: int | None = None
    """Where a request that is only prefilled ends."""
    transfer: str | None = None
    """The push that lands in its blocks."""
    arriving: Flight | None = None
    """Ends when the push's first layer has arrived, or never will."""
    tier: str = HOST
    window: int = 0
    miss: MissReason | None = None
    saved: int = 0
    """Tokens whose blocks are stored, were ordered to be, or are not to be."""
    loaded: int = 0
    counted: int = 0
    computed: int = 0
    recomputed: int = 0
    preemptions: int = 0
    submitted_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    receipts: list[LoadOutcome | SaveOutcome] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be sampled, or before all is prefilled."""
        return self.end - self.done

    @property
    def end(self) -> int:
        """Tokens that are to be run."""
        return len(self.tokens) if self.until is None else self.until

    def ran(self, end: int) -> None:
        """A forward over tokens [done, end) counts: prompt tokens seen for the first time, or anything once more."""
        fresh = max(0, end - max(self.done, self.counted))
        self.recomputed += end - self.done - fresh
        self.computed += max(0, min(end, self.prompt_tokens) - max(self.done, self.counted))
        self.counted = max(self.counted, end)
        self.done = end

    def promised(self, tokens: int) -> None:
        """A load of the first `tokens` tokens is on its way; the first promise counts as loaded."""
        self.done = self.saved = tokens
        if self.counted < tokens:
            self.loaded += min(tokens, self.prompt_tokens) - min(self.counted, self.prompt_tokens)
            self.counted = tokens

    def broken(self) -> None:
        """The load failed: everything runs from the start, and nothing counts as loaded."""
        self.miss = MissReason.LOST
        self.recomputed += self.loaded
        self.loaded = self.computed = self.counted = self.done = self.saved = 0
        self.load = False

    def rewound(self) -> None:
        """The blocks are gone (preemption): run again from the start."""
        self.done = self.saved = 0
        self.preemptions += 1

    def result(self, finish: Finish, reason: str = "") -> Result:
        """The result as of now."""
        first = self.first_token_s
        return Result(
            request=self.id,
            tokens=tuple(self.tokens[self.prompt_tokens :]),
            finish=finish,
            prompt_tokens=self.prompt_tokens,
            computed_tokens=self.computed,
            loaded_tokens=self.loaded,
            recomputed_tokens=self.recomputed,
            ttft_s=0.0 if first is None else first - self.submitted_s,
            preemptions=self.preemptions,
            receipts=tuple(self.receipts),
            receipt=self._receipt(reason),
            logits=torch.stack(self.logits) if self.logits else None,
        )

    def _receipt(self, reason: str) -> Receipt:
        loads = [outcome for outcome in self.receipts if isinstance(outcome, LoadOutcome)]
        landed = [load for load in loads if load.end is LoadEnd.LANDED]
        failed = next((load for load in loads if load.end is not LoadEnd.LANDED), None)
        miss = self.miss if failed is None else _WHY[failed.end]
        return Receipt(
            request=self.id,
            prompt_tokens=self.prompt_tokens,
            computed_tokens=self.computed,
            loaded_tokens=self.loaded,
            nbytes=sum(load.nbytes for load in landed),
            layers=max((load.layers for load in landed), default=0),
            tier=self.tier,
            window=self.window,
            transfer_s=sum(load.transfer_s for load in loads),
            exposed_s=total(load.exposed_s for load in loads),
            verified=bool(landed) and all(load.verified for load in landed),
            miss=None if self.loaded else miss,
            detail="; ".join(filter(None, ("" if failed is None else failed.reason, reason))),
        )
