"""What every examination gives: findings, each with what to do, and which of them mean nothing where another fails."""

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How much a finding matters. Only an ERROR makes the command fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"
    UNCHECKED = "not checked"


class Check(msgspec.Struct, frozen=True):
    """One finding: what was looked at, what was found, and what to do (empty where all is well)."""

    name: str
    level: Level
    found: str
    advice: str = ""


RESTS_ON = {
    "groups": ("model",),
    **dict.fromkeys(("bytes", "room", "cache", "ranks", "drafts"), ("model", "groups")),
    **dict.fromkeys(("memory", "memlock", "folder"), ("settings", "model", "groups")),
    "weights": ("disk",),
}
"""A finding's name, to those without which it means nothing."""


def after_refusals(checks: Iterable[Check]) -> Iterator[Check]:
    """The same, but what rests on an ERROR before it is not checked."""
    refused: set[str] = set()
    for check in checks:
        if check.level is Level.ERROR:
            refused.add(check.name)
        on = next((name for name in RESTS_ON.get(check.name, ()) if name in refused), None)
        yield check if on is None else Check(check.name, Level.UNCHECKED, f"Rests on `{on}`, which is refused above.")


def numbers(text: str) -> tuple[int, ...]:
    """Major and minor of a version such as 2.13.0+cpu."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])
