"""The one frozen set of settings, and the only file that reads the environment.

Does not know what the settings do; rooms receive values, never this module's sources.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import msgspec

from layercast.errors import BadSetting, UnknownSetting

ENV_PREFIX = "LAYERCAST_"
GIB = 1 << 30
MAX_DEFAULT_HOST_BYTES = 16 * GIB
SIZE = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*(?:([KMGT])(I?))?B", re.IGNORECASE)
"""A size with its unit: KiB, MiB, GiB, TiB are powers of 1,024; kB, MB, GB, TB of 1,000."""


def _default_host_bytes() -> int:
    """An eighth of the machine's memory, at most 16 GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory // 8, MAX_DEFAULT_HOST_BYTES)


Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.001, le=1e9)]
"""Of something that ends."""


class _AsFromMapping(msgspec.StructMeta):
    """Has `Config(...)` take, and refuse, what a mapping may hold, in the same words."""

    def __call__(cls, **values: object) -> "Config":
        return from_mapping(values, "Config")


class Config(msgspec.Struct, metaclass=_AsFromMapping, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine; every field is a key a user may set.

    Names end in their unit: _ms, _s, _us, _bytes. Wherever a user writes them, bytes may have a unit: "8GiB".
    """

    use_layerwise: bool = True
    """False moves all layers as one window (bulk); the tokens are the same."""
    backend: str = "host"
    """Where pooled KV lives: "host", the slab in this process, and nowhere else yet."""
    layerwise_window: Positive = 1
    """Layers moved and signalled together (1 = pure layerwise)."""
    layerwise_prefetch_layers: Positive = 2
    """Windows in flight ahead of compute (depth). Two keep a link busy, and a load that comes later waits for no more
    than these. On a GPU it changes nothing: there a load is handed over whole."""
    layerwise_exposed_ms: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    """Longest that running requests may be expected to wait for a load in their forward; beyond it the load starts in
    the background."""
    layerwise_max_transfer_blocks: Count = 0
    """Most blocks in one batch handed to a mover; 0 = no limit."""
    layerwise_max_transfer_bytes: Count = 0
    """Most bytes in one batch handed to a mover; 0 = no limit."""
    h2d_stagger_us: Count = 0
    """Microseconds by which a rank's loads start later than those of the rank before, where ranks share the way to host
    memory."""
    host_bytes: Positive = msgspec.field(default_factory=_default_host_bytes)
    """Size of the slab, per rank."""
    disk_path: str = ""
    """Folder under the slab, which engines may share; what is saved is written behind to it. Empty: none."""
    disk_bytes: Positive = 32 << 30
    """Most bytes in that folder, per rank; the least recently used go first."""
    save_decode_cache: bool = True
    """Whether KV of generated tokens is saved."""
    discard_partial_chunks: bool = True
    """The pool keeps whole blocks only, so there is no other value: a part of one is nobody else's prefix."""
    kv_recompute_threshold: Count = 64
    """A hit of fewer tokens than this is recomputed rather than loaded; 0 = every hit is loaded, whatever it costs."""
    layer_wait_ms: Positive = 10_000
    """Longest wait for one layer; after it the request is recomputed."""
    push_timeout_s: Seconds = 60.0
    """Longest life of a push from its offer to its landing."""
    lease_s: Seconds = 60.0
    """How long blocks promised to a request stay where they are."""
    verify: bool = True
    """Compare a digest of every landed layer with the one taken at saving. Not between a GPU and the slab: receipts of
    such loads say `verified: false`."""

    @property
    def block_major(self) -> bool:
        """Whether engines that can choose should keep all layers of a block together.

        Only windows of several layers gain by it: of one layer, a block is a single piece either way.
        """
        return not self.use_layerwise or self.layerwise_window > 1


_ONLY = {"backend": "host", "discard_partial_chunks": True}
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Config)}
KNOWN = tuple(sorted(_TYPES))


def from_mapping(values: Mapping[str, Any], source: str = "settings") -> Config:
    """Config from a mapping (an engine's own channel); `source` names it in messages.

    Raises UnknownSetting with the nearest and all known keys, BadSetting with the field and the values it takes.
    """
    return msgspec.convert(_read(values, source), Config)


def _read(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The settings of one source, each as the type that it has here. Raises UnknownSetting, BadSetting."""
    unknown = sorted(set(values) - set(KNOWN))
    if unknown:
        named = ", ".join(map(_with_nearest, unknown))
        raise UnknownSetting(f"{source}: unknown setting {named}; known: {', '.join(KNOWN)}")
    return {key: _value(key, value, source) for key, value in values.items()}


def _with_nearest(name: str) -> str:
    """An unknown name, and the known one that may be meant, where one is near."""
    near = get_close_matches(name.lower(), KNOWN, n=1)
    return f"{name} (did you mean {near[0]}?)" if near else name


def _value(key: str, value: object, source: str) -> object:
    """A setting's value, however it was written. Raises BadSetting."""
    plain = _bytes(key, value, source) if key.endswith("_bytes") else value
    try:
        found = msgspec.convert(plain, _TYPES[key], strict=False)
    except msgspec.ValidationError as error:
        wanted = str(error)  # "Expected `float`, got `str`", "Expected `int` >= 1"
        _, bound, least = wanted.partition(" >= ")
        why = f"the least value is {least}" if bound else wanted[0].lower() + wanted[1:]
        raise BadSetting(f"{source}: {key} = {value!r}: {why}") from error
    if found != _ONLY.get(key, found):
        raise BadSetting(f"{source}: {key} = {found!r}: the only value is {_ONLY[key]!r}")
    return found


def _bytes(key: str, value: object, source: str) -> object:
    """A size as a number, where it is written with a unit. Raises BadSetting for other words."""
    if not isinstance(value, str) or value.strip().isdecimal():
        return value
    if (match := SIZE.fullmatch(value.strip())) is None:
        raise BadSetting(f"{source}: {key} = {value!r}: write bytes, or a size with its unit, such as 8GiB or 500MB")
    return round(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper()))


def size(count: int) -> str:
    """Bytes for people."""
    if 0 < count < 1 << 20:
        return f"{count:,} bytes"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def rounded_down(count: int) -> str:
    """The most bytes of few digits that are no more than `count`, as a setting is written: "10.4GiB"."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20)):
        if count >= scale:
            return str(count * 10 // scale / 10).removesuffix(".0") + unit
    return str(count)


def as_setting(count: int) -> int | str:
    """The same bytes as they are best written in a setting: "20GiB", "500MB"; the number where no unit is exact."""
    for unit, scale in {"GiB": GIB, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6}.items():
        text = f"{count / scale:.2f}".rstrip("0").rstrip(".") + unit
        if count >= scale and _bytes("", text, "") == count:
            return text
    return count


def as_written(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a user would write them: bytes with a unit."""

    def one(key: str, value: object) -> object:
        return as_setting(value) if key.endswith("_bytes") and isinstance(value, int) else value

    return {key: one(key, value) for key, value in settings.items()}


def from_sources(
    path: Path | None = None, environ: Mapping[str, str] = os.environ, pairs: Sequence[str] = ()
) -> Config:
    """Config from a TOML file, then the environment, then `key=value` pairs; the later source wins.

    Raises what from_mapping raises, naming the source.
    """
    wrong = next((pair for pair in pairs if "=" not in pair), None)
    if wrong is not None:
        raise BadSetting(f"setting {wrong!r}: write it as key=value; known keys: {', '.join(KNOWN)}")
    sources = {
        str(path): _toml_values(path) if path is not None else {},
        "environment": {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(ENV_PREFIX)
        },
        "command line": dict(pair.split("=", 1) for pair in pairs),
    }
    merged: dict[str, Any] = {}
    for name, values in sources.items():
        merged |= _read(values, name)
    return msgspec.convert(merged, Config)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where files that can be made again lie by default: `layercast` in the user's cache folder."""
    home = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "layercast"


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there; one that may not be looked at counts as absent."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))


def _toml_values(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadSetting(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise BadSetting(f"{path}: {error}") from error
