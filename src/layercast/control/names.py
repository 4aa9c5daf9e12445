"""Keys of live requests' blocks, each hashed when it is first asked for, and once.

Does not know which keys are stored, nor what is moved.
"""

import secrets
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, overload

import msgspec

from layercast.plan.prefix import BOUNDED
from layercast.spec.groups import GroupSpec
from layercast.spec.keys import ExtrasOf, Identity, extras_for, keys_of, token_bytes

RENEWED = " renewed "
GROWTH = 4
"""Where key by key is looked up, how many times as many are hashed each time."""
LEAST_SAID, MOST_SAID = 4, 1 << 17
"""Blocks of a run that is remembered, and of all that are: some 30 MiB where a block has 16 tokens."""


class Digested(Sequence[int]):
    """Token ids with digests of their prefixes: what was named before is found by these, and no id is looked at.

    digests: of the tokens up to each multiple of `size`: equal only where all of these are. They grow with the tokens.
    """

    __slots__ = ("_tokens", "digests", "size")

    def __init__(self, tokens: Sequence[int], digests: Sequence[bytes], size: int) -> None:
        self._tokens, self.digests, self.size = tokens, digests, size

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._tokens[index]

    def tell(self, blocks: int, size: int) -> bool:
        """Whether there is a digest at the end of each of so many blocks of `size` tokens."""
        return size % self.size == 0 and len(self.digests) * self.size >= blocks * size


class _Run(NamedTuple):
    """Keys of neighbours, and what is said of them: the bytes of their tokens, and digests where there are any."""

    ids: bytes
    digests: Sequence[bytes]
    keys: list[bytes]

    def common(self, ids: bytes, width: int) -> int:
        """How many whole blocks of `width` bytes agree from the first one on."""
        blocks = min(len(ids), len(self.ids)) // width
        if self.ids.startswith(ids):
            return blocks
        return bisect_left(range(1, blocks + 1), True, key=lambda end: self.ids[: end * width] != ids[: end * width])


class Said:
    """Runs of blocks named lately, by the key before each: what follows that key again need not be hashed again."""

    def __init__(self) -> None:
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()
        self._blocks = 0

    def get(self, parent: bytes) -> _Run | None:
        """The run that was last said to follow a key."""
        if (run := self._runs.get(parent)) is not None:
            self._runs.move_to_end(parent)
        return run

    def add(self, parent: bytes, run: _Run) -> None:
        """Remember a run, and forget the ones unused for longest where that makes too many."""
        self._blocks += len(run.keys)
        if (other := self._runs.pop(parent, None)) is not None:
            self._blocks -= len(other.keys)
        self._runs[parent] = run
        while self._blocks > MOST_SAID:
            self._blocks -= len(self._runs.popitem(last=False)[1].keys)

    def clear(self) -> None:
        """Forget all."""
        self._runs.clear()
        self._blocks = 0


class Chain(Sequence[bytes]):
    """The keys of a prompt's full blocks in one group. known: the leading ones that were hashed so far; it grows.

    tokens: read when a key is asked for; what is there may not change, but there may be more. Raises NotCacheable then.
    """

    __slots__ = ("_blocks", "_digests", "_extras", "_root", "_said", "_size", "_step", "_tokens", "known")

    def __init__(
        self,
        known: list[bytes],
        root: bytes,
        tokens: Sequence[int],
        end: int,
        size: int,
        extras: ExtrasOf | None,
        said: Said,
    ) -> None:
        self.known = known
        self._root, self._tokens, self._blocks, self._size = root, tokens, end // size, size
        self._extras, self._said = extras, said
        self._digests: Sequence[bytes] = ()
        if isinstance(tokens, Digested) and tokens.tell(self._blocks, size):
            self._digests, self._step = tokens.digests, size // tokens.size

    def __len__(self) -> int:
        return self._blocks

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        at = range(self._blocks)[index]
        if isinstance(at, int):
            return self.upto(at + 1)[at]
        known = self.upto(1 + max(at[0], at[-1]) if at else 0)
        return known[at.start : at.stop] if at.step == 1 else [known[i] for i in at]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self[:])

    def upto(self, end: int) -> list[bytes]:
        """`known`, with at least `end` keys. Behind what was remembered one is hashed, and then it is asked again."""
        known, size, extras, last = self.known, self._size, self._extras, end
        while (first := len(known)) < end:
            parent = known[-1] if known else self._root
            before = None if extras else self._said.get(parent)
            if before is not None and (same := self._same(before, first)):
                known += before.keys[:same]
                last = len(known) + 1
                continue
            ids = token_bytes(self._tokens[first * size : last * size])
            fresh = keys_of(parent, ids, size, extras, first)
            known += fresh
            if not extras and len(fresh) >= LEAST_SAID:
                told = self._digests and self._digests[(first + 1) * self._step - 1 : last * self._step : self._step]
                self._said.add(parent, _Run(ids, told, fresh))
            last = end
        return known

    def _same(self, run: _Run, first: int) -> int:
        """How many blocks of a run are ours from `first` on."""
        most = min(len(run.keys), self._blocks - first)
        if run.digests and self._digests:
            ours, step = self._digests, self._step
            return bisect_left(range(most), True, key=lambda at: run.digests[at] != ours[(first + at + 1) * step - 1])
        return run.common(token_bytes(self._tokens[first * self._size : (first + most) * self._size]), 4 * self._size)

    def until(self, there: Callable[[bytes], bool], first: int = 0) -> int:
        """The index of the first key from `first` on that is not there. Hashes little more than it needs.

        What comes before is named in goes as well: what was remembered begins where an earlier look-up ended one.
        """
        if len(self.known) < first < self._blocks:
            self._go_on(bool, len(self.known), first)
        return self._go_on(there, first, self._blocks)

    def _go_on(self, there: Callable[[bytes], bool], first: int, last: int) -> int:
        """The index of the first key in [first, last) that is not there, or at least `last`, in ever larger goes."""
        at = start = first
        while at < last:
            end = min(last, at + max(1, (GROWTH - 1) * (at - start)))
            known = self.upto(end)
            if len(known) > end:  # that far it was remembered; what follows may be nobody's
                start = len(known)
            at += len(list(takewhile(there, known[at:])))
            if at < len(known):
                break
        return min(at, self._blocks)


class Names:
    """Chains of keys of live requests. specs, identities: one a group; the smallest block of all names extras."""

    def __init__(self, specs: Sequence[GroupSpec], identities: Sequence[Identity]) -> None:
        self._sizes = [spec.block_size for spec in specs]
        self._grain = min(self._sizes)
        self._identities = tuple(identities)
        self._roots = [identity.digest() for identity in identities]
        self._known: dict[str, list[list[bytes]]] = {}
        self._said = Said()

    def __len__(self) -> int:
        return len(self._known)

    def of(
        self, request: str | None, tokens: Sequence[int], end: int, extras: ExtrasOf | None = None
    ) -> tuple[Chain, ...]:
        """Keys of the full blocks of `tokens[:end]`, by group. request: remember what is hashed until `forget`."""
        known: list[list[bytes]] = [[] for _ in self._sizes]
        if request is not None:
            known = self._known.setdefault(request, known)
        return tuple(
            [
                Chain(
                    named,
                    root,
                    tokens,
                    end,
                    size,
                    extras_for(extras, self._grain, size) if extras else None,
                    self._said,
                )
                for named, root, size in zip(known, self._roots, self._sizes, strict=True)
            ]
        )

    def first(self, chains: Sequence[Chain]) -> list[bytes]:
        """The key of the first smallest block, if there is one: where two differ, no key of the one is the other's."""
        return chains[self._sizes.index(self._grain)][:1] if chains else []

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._known.pop(request, None)

    def renew(self) -> None:
        """Give all keys to come another root."""
        end = f"{RENEWED}{secrets.token_hex(8)}"
        self._identities = tuple(
            msgspec.structs.replace(one, weights_version=one.weights_version.split(RENEWED)[0] + end)
            for one in self._identities
        )
        self._roots = [identity.digest() for identity in self._identities]
        self._known.clear()
        self._said.clear()


def presence(
    specs: Sequence[GroupSpec],
    chains: Sequence[Chain],
    has: Sequence[Callable[[bytes], bool]],
    local_tokens: int,
    least: Sequence[Sequence[bool]] = (),
) -> list[list[bool]]:
    """Whether each block is there, by group, up to the first absent one that a prefix needs: behind it none is named.

    has: for each group, whether a key is there. local_tokens: as in `usable_prefix`. least: what is known to be there.
    """
    ends = []
    for spec, chain, there, known in zip(specs, chains, has, least or [()] * len(specs), strict=True):
        first = max(local_tokens // spec.block_size, len(known))
        ends.append(spec.block_size * (len(chain) if spec.kind in BOUNDED else chain.until(there, first)))
    end, rows = min(ends), []
    for spec, chain, there in zip(specs, chains, has, strict=True):
        count = end // spec.block_size
        rows.append(list(map(there, chain[:count])) if spec.kind in BOUNDED else [True] * count)
    return rows
