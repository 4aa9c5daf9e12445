"""How much memory this process may still take. Imports nothing but paths, so that a look at a machine is quick."""

from pathlib import Path

GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where a container's limit stands, in the two versions of control groups: folder, limit, use, what of it is cache."""


def memory_free(root: Path = Path("/")) -> int | None:
    """Bytes that could be taken without swapping or passing a container's limit, where Linux tells."""
    found = [1024 * free for free in (_number(root / "proc/meminfo", "MemAvailable:"),) if free is not None]
    for folder, limit, used, cached in GROUPS:
        place = root / "sys/fs/cgroup" / folder
        most, now = _number(place / limit), _number(place / used)
        if most is not None and now is not None:
            found.append(max(0, most - now + (_number(place / "memory.stat", cached) or 0)))
    return min(found, default=None)


def _number(path: Path, name: str | None = None) -> int | None:
    """The number in a file, or behind a name in it; None where there is none (a limit may be "max")."""
    try:
        words = path.read_text().split()
    except OSError:
        return None
    word = words[words.index(name) + 1] if name in words else "".join(words[:1]) if name is None else ""
    return int(word) if word.isdigit() else None
