"""Keys of live requests' blocks, each hashed when it is first asked for, and once.

Does not know which keys are stored, nor what is moved.
"""

import secrets
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import overload

import msgspec

from layercast.plan.prefix import BOUNDED
from layercast.spec.groups import GroupSpec
from layercast.spec.keys import ExtrasOf, Identity, continued_keys, extras_for

RENEWED = " renewed "
GROWTH = 4
"""Where key by key is looked up, how many times more are hashed each time."""


class Chain(Sequence[bytes]):
    """The keys of a prompt's full blocks in one group. known: the leading ones that were hashed so far; it grows.

    tokens: read when a key is asked for; what is there may not change, but there may be more. Raises NotCacheable then.
    """

    __slots__ = ("_blocks", "_extras", "_root", "_size", "_tokens", "known")

    def __init__(
        self, known: list[bytes], root: bytes, tokens: Sequence[int], end: int, size: int, extras: ExtrasOf | None
    ) -> None:
        self.known = known
        self._root, self._tokens, self._blocks, self._size, self._extras = root, tokens, end // size, size, extras

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
        known = self.upto(max(at, default=-1) + 1)
        return known[: self._blocks][index]

    def upto(self, end: int) -> list[bytes]:
        """`known`, with at least `end` keys."""
        known, size = self.known, self._size
        if (first := len(known)) < end:
            rest = self._tokens[first * size : end * size]
            known += continued_keys(known[-1] if known else self._root, rest, size, self._extras, first)
        return known

    def until(self, there: Callable[[bytes], bool], first: int = 0) -> int:
        """The index of the first key from `first` on that is not there. Hashes little more than it needs."""
        at = first
        while at < self._blocks:
            known = self.upto(at + 1)
            at += len(list(takewhile(there, known[at:])))
            if at < len(known):
                break
            self.upto(min(self._blocks, GROWTH * at))
        return min(at, self._blocks)


class Names:
    """Chains of keys of live requests. specs, identities: one a group; the smallest block of all names extras."""

    def __init__(self, specs: Sequence[GroupSpec], identities: Sequence[Identity]) -> None:
        self._sizes = [spec.block_size for spec in specs]
        self._grain = min(self._sizes)
        self._identities = tuple(identities)
        self._roots = [identity.digest() for identity in identities]
        self._known: dict[str, list[list[bytes]]] = {}

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
                Chain(named, root, tokens, end, size, extras_for(extras, self._grain, size) if extras else None)
                for named, root, size in zip(known, self._roots, self._sizes, strict=True)
            ]
        )

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


def presence(
    specs: Sequence[GroupSpec], chains: Sequence[Chain], has: Sequence[Callable[[bytes], bool]], local_tokens: int
) -> list[list[bool]]:
    """Whether each block is there, by group, up to the first absent one that a prefix needs: behind it none is named.

    has: for each group, whether a key is there. local_tokens: as in `usable_prefix`.
    """
    whole = [spec.kind not in BOUNDED for spec in specs]
    ends = [
        spec.block_size * (chain.until(there, local_tokens // spec.block_size) if all_of_it else len(chain))
        for spec, chain, there, all_of_it in zip(specs, chains, has, whole, strict=True)
    ]
    counts = [min(ends) // spec.block_size for spec in specs]
    return [
        [True] * count if all_of_it else list(map(there, chain[:count]))
        for chain, there, all_of_it, count in zip(chains, has, whole, counts, strict=True)
    ]
