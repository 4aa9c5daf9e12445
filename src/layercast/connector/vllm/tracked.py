"""What the scheduler-side hooks remember of one request, from its first look-up to its end.

Does not know the pool or the engine's scheduler.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec
from vllm.v1.request import Request

from layercast.connector.vllm.terms import Terms
from layercast.control.names import Digested
from layercast.control.scheduler import Match
from layercast.flow.orders import LoadEnd, LoadOrder, LoadOutcome
from layercast.observe.receipts import HOST, MissReason, Receipt
from layercast.plan.policy import NO_HIT, Decision
from layercast.spec.keys import Extra

KEY, NEAR = "layercast", 0.8
"""Where a request states its wishes, and how like it another key is that was meant for it: one or two wrong letters."""


@dataclass(slots=True, eq=False)
class Tracked:
    """One live request.

    extras: what besides its tokens decides its KV. load, save: whether the pool may. saved: leading tokens whose saves
    have been ordered. loading: the load whose outcome it awaits. told: whether it asked to be told, in its reply, what
    the pool did.
    """

    request: Request
    extras: Mapping[int, Sequence[Extra]]
    load: bool
    save: bool
    told: bool = False
    saved: int = 0
    match: Match | None = None
    """What was found when it was last asked about, promised or not."""
    local: int = 0
    """Leading tokens that vLLM held itself."""
    promised: int = 0
    tier: str = HOST
    """Where what was promised came from: "disk" if any of it was brought up for this request."""
    counted: bool = False
    """Whether its first look-up is in the metrics."""
    asked_s: float | None = None
    """When it was first told to ask again."""
    decision: Decision = NO_HIT
    order: str = ""
    """The id of its last load."""
    parked: bool = False
    """Whether it waits, or waited last, in the background."""
    loading: LoadOrder | None = None
    loaded: LoadOutcome | None = None
    """How its last load ended, on one rank; on one where it has failed, if there is any."""
    miss: MissReason | None = None
    problem: str = ""
    """What is wrong with its wishes."""
    salted: bool = False
    """Whether a salt, its own or vLLM's, keeps it apart from others."""
    digested: int = 0
    """Of how many tokens vLLM has one digest more; 0: none to rely on."""

    @property
    def tokens(self) -> Sequence[int]:
        """Its tokens, as far as they are known."""
        ids = self.request.all_token_ids
        return Digested(ids, self.request.block_hashes, self.digested) if self.digested else ids

    def may_wait(self, most_s: float) -> bool:
        """Whether it may be told to ask again, for so many seconds from the first time on."""
        now = time.monotonic()
        self.asked_s = self.asked_s or now
        return now < self.asked_s + most_s

    def brings(self, wanted: Match) -> bool:
        """Whether its load is under way in the background, and has most of what another would load, but not much more.

        That one finds it in vLLM's own cache then: sooner than by a load that queues behind this one, and in the same
        blocks. What it lacks before these would keep it from finding any. Whatever it asks for, the middle one of its
        blocks tells, as keys name all that is before them.
        """
        if self.loading is None or not self.parked or self.match is None:
            return False
        mine, asked = self.match.needed[0], wanted.needed[0]
        if mine.start > asked.start or len(mine) > 2 * len(asked):
            return False
        middle = asked.start + len(asked) // 2
        return middle in mine and middle in asked and self.match.keys[0][middle] == wanted.keys[0][middle]

    def heard(self, load: LoadOutcome) -> None:
        """Its load has ended on a rank. What has failed on one is not in place, whatever others say behind it."""
        if self.loaded is None or self.loaded.id != load.id or self.loaded.end is LoadEnd.LANDED:
            self.loaded = load

    @property
    def reply(self) -> dict[str, Any] | None:
        """What the request's reply carries of the pool."""
        if not self.told:
            return None
        tier = self.tier if self.promised else ""
        return {KEY: {"loaded_tokens": self.promised, "tier": tier, "miss": self.why}}

    @property
    def why(self) -> str:
        """Why nothing was loaded, as a sentence; empty where something was."""
        if self.miss is None or self.promised:
            return ""
        return f"{self.missed}: {self.problem}" if self.problem else str(self.missed)

    @property
    def missed(self) -> MissReason | None:
        """The reason for a miss, as it reads where a salt is in force."""
        never = self.salted and self.miss is MissReason.NEVER_STORED
        return MissReason.NEVER_UNDER_SALT if never else self.miss

    def receipt(self, layout: str) -> Receipt:
        """What the pool did for it. nbytes, layers and times are one rank's. layout: the engine's."""
        load, prompt = self.loaded, self.request.num_prompt_tokens
        landed = self.promised if load is not None and load.end is LoadEnd.LANDED else 0
        held = min(self.local, prompt - landed)
        return Receipt(
            request=self.request.request_id,
            prompt_tokens=prompt,
            computed_tokens=prompt - landed - held,
            held_tokens=held,
            loaded_tokens=landed,
            nbytes=0 if load is None else load.nbytes,
            layers=0 if load is None else load.layers,
            layout=layout,
            tier=self.tier if landed else "",
            mode=self.decision.mode if self.promised else "",
            window=self.decision.window,
            reason=self.decision.reason,
            transfer_s=0.0 if load is None else load.transfer_s,
            exposed_s=0.0 if load is None else load.exposed_s,
            verified=load is not None and load.verified,
            miss=None if self.promised else self.missed,
            detail=self.problem if load is None else load.reason,
        )


class Wishes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request may ask of the pool, under "layercast" in its `kv_transfer_params`."""

    save: bool = True
    load: bool = True
    salt: str = ""


NOTHING_ASKED = Wishes()


def first_sight(request: Request, terms: Terms) -> tuple[Tracked, str]:
    """A request that is new, as its wishes and the engine's terms have it, and the salt that it wishes."""
    wishes, stated, problem = wishes_of(request)
    load, save = wishes.load and terms.loads, wishes.save and terms.saves
    salted = bool(wishes.salt or request.cache_salt)
    known = Tracked(request, {}, load=load, save=save, told=stated, problem=problem, salted=salted)
    known.miss = MissReason.UNREADABLE if problem else None if terms.loads else MissReason.PRODUCER
    known.digested = terms.digested
    return known, wishes.salt


def wishes_of(request: Request) -> tuple[Wishes, bool, str]:
    """(its wishes, whether it has stated any, why they can't be read: then it neither saves nor loads)."""
    if not (params := request.kv_transfer_params):
        return NOTHING_ASKED, False, ""
    stated = params.get(KEY)
    if stated is None:
        meant = get_close_matches(KEY, [key for key in params if isinstance(key, str)], n=1, cutoff=NEAR)
        if not meant:
            return NOTHING_ASKED, False, ""
        return Wishes(save=False, load=False), True, f"{meant[0]!r} is unknown: write {KEY!r}"
    try:
        return msgspec.convert(stated, Wishes), True, ""
    except msgspec.ValidationError as error:
        return Wishes(save=False, load=False), True, str(error)
