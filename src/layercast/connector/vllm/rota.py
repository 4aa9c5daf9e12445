"""Which requests a step may complete blocks of, so that no step looks at everybody who runs.

Does not know tokens, blocks or why a request is looked at.
"""

from collections.abc import Container


class Rota:
    """Requests that are looked at in every step, and those whose turn comes in some steps."""

    def __init__(self) -> None:
        self._step = 0
        self._always: dict[str, None] = {}
        self._turns: dict[str, int] = {}
        """The step in which each of the others is looked at next."""
        self._later: dict[int, dict[str, None]] = {}

    def always(self, name: str) -> None:
        """Look at it in each step from now on."""
        self._turns.pop(name, None)
        self._always[name] = None

    def later(self, name: str, steps: int) -> None:
        """Look at it next when so many steps have passed, at least one."""
        self._always.pop(name, None)
        self._turns[name] = turn = self._step + max(1, steps)
        self._later.setdefault(turn, {})[name] = None

    def drop(self, name: str) -> None:
        """Look at it no more."""
        self._always.pop(name, None)
        self._turns.pop(name, None)

    def begin(self, scheduled: Container[str]) -> list[str]:
        """A step begins: those to look at. Who has a turn and is not scheduled has it in the next step."""
        self._step += 1
        turn = [name for name in self._later.pop(self._step, ()) if self._turns.get(name) == self._step]
        for name in turn:
            if name not in scheduled:
                self.later(name, 1)
        return [name for name in (*self._always, *turn) if name in scheduled]
