"""What every examination gives: findings, each with what to do. Knows nothing that could be found."""

from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How much a finding matters. Only an ERROR makes the command fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Check(msgspec.Struct, frozen=True):
    """One finding: what was looked at, what was found, and what to do (empty where all is well)."""

    name: str
    level: Level
    found: str
    advice: str = ""


def numbers(text: str) -> tuple[int, ...]:
    """Major and minor of a version such as 2.13.0+cpu."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])
