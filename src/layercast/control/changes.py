"""What became visible in a directory and what was dropped, in order, for those who route requests by it.

Does not know leases, slots or who listens.
"""

from collections.abc import Iterable, Sequence

import msgspec


class Change(msgspec.Struct, frozen=True):
    """Blocks of one group, neighbours in a prompt, that can be found from now on; or, if not `stored`, no longer.

    first: index of the first block in its prompt; parent: the key before it, None at the start. tokens: of the prompt,
    as far as they are known and alone decide the keys; else none.
    """

    group: int
    keys: tuple[bytes, ...]
    stored: bool
    first: int = 0
    parent: bytes | None = None
    tokens: Sequence[int] = ()


class Changes:
    """A list that grows until it is taken."""

    def __init__(self) -> None:
        self._since: list[Change] = []

    def stored(self, group: int, chain: Sequence[bytes], fresh: Iterable[int], tokens: Sequence[int]) -> None:
        """Those of a chain of keys whose indices are `fresh` became visible."""
        run: list[int] = []
        for index in sorted(fresh):
            if run and index != run[-1] + 1:
                self._run(group, chain, run, tokens)
                run = []
            run.append(index)
        if run:
            self._run(group, chain, run, tokens)

    def dropped(self, group: int, keys: Iterable[bytes]) -> None:
        """Keys that can't be found any more."""
        if gone := tuple(keys):
            self._since.append(Change(group, gone, stored=False))

    def take(self) -> list[Change]:
        """What has changed since the last call."""
        since, self._since = self._since, []
        return since

    def _run(self, group: int, chain: Sequence[bytes], run: Sequence[int], tokens: Sequence[int]) -> None:
        first, last = run[0], run[-1]
        parent = chain[first - 1] if first else None
        self._since.append(Change(group, tuple(chain[first : last + 1]), True, first, parent, tokens))
