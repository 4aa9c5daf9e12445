"""Keys: 32 bytes that name the content of one block, and of everything before it.

A chain of SHA-256: the root is the digest of an identity (model, weights, dtypes, layout ...), each block's key is the
hash of its parent's key, its token ids and its tagged extras. Every part is length-prefixed, so that no two different
contents share an encoding. No process state and no environment enters a key.
Does not know where blocks lie, nor how an engine finds that a block has extras.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from struct import error as StructError
from struct import pack

import msgspec
import numpy as np
import numpy.typing as npt

from layercast.errors import NotCacheable

KEY_BYTES = 32
MAX_TOKEN = 2**31 - 1
_BLOCK = b"layercast block 1"
_NO_EXTRAS = bytes(8)


class ExtraKind(StrEnum):
    """What changes a block's KV besides its token ids."""

    ADAPTER = "adapter"
    MEDIA = "media"
    EMBEDDINGS = "embeddings"
    SALT = "salt"


class Extra(msgspec.Struct, frozen=True):
    """One reason why equal tokens mean other KV in a block.

    digest: of the content (an adapter's files, a medium, the embeddings), or the salt itself; never a mere name.
    offset: for media, the position of its first token relative to the block's first one (negative if it began before).
    """

    kind: ExtraKind
    digest: bytes
    offset: int | None = None


ExtrasOf = Callable[[int], Sequence[Extra]] | Mapping[int, Sequence[Extra]]
"""Block index to the extras of that block; an absent index has none. `extras_for` suits it to other block sizes."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the tokens that decides the bytes of a group's blocks.

    dtypes: (plane name or kind, dtype) of every plane. kv_scales: digest of the scales of quantised KV, "" without.
    layout: tag of the order and packing inside a block. draft: digest of the draft model's configuration, "" without.
    """

    model: str
    revision: str
    weights_version: str
    dtypes: tuple[tuple[str, str], ...]
    layout: str
    group: str
    block_size: int
    kv_scales: str = ""
    draft: str = ""

    def digest(self) -> bytes:
        """32 bytes, the root of every chain of keys; the order of `dtypes` does not matter."""
        parts = [b"layercast identity 1"]
        for field, value in self._fields().items():
            if isinstance(value, list):
                parts += [_text(field), _packed([_packed([_text(name), _text(dtype)]) for name, dtype in value])]
            else:
                parts += [_text(field), _text(value)]
        return sha256(_packed(parts)).digest()

    def differences(self, other: "Identity") -> tuple[str, ...]:
        """Names of the fields in which two identities differ, for a message; none if their digests are equal."""
        theirs = other._fields()
        return tuple(name for name, value in self._fields().items() if value != theirs[name])

    def _fields(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__struct_fields__} | {"dtypes": sorted(self.dtypes)}


def block_keys(
    identity: Identity, tokens: Sequence[int] | npt.NDArray[np.integer], extras: ExtrasOf | None = None
) -> list[bytes]:
    """One key for each full block of `tokens`; the tail of less than a block has none.

    Raises NotCacheable for a token id or an extra that can't be named.
    """
    full = len(tokens) // identity.block_size * identity.block_size
    return keys_of(identity.digest(), token_bytes(tokens[:full]), identity.block_size, extras)


def extras_for(extras: ExtrasOf | None, named: int, block_size: int) -> ExtrasOf | None:
    """Extras by blocks of `named` tokens, as blocks of `block_size` tokens see them.

    An extra in part of a block changes the whole block, so each is tagged with where its part begins.
    """
    if extras is None or named == block_size:
        return extras
    find = _finder(extras)

    def inside(block: int) -> list[Extra]:
        start = block * block_size
        parts = range(start // named, -(-(start + block_size) // named))
        return [_at(extra, part * named - start) for part in parts for extra in find(part) or ()]

    return inside


def keys_of(
    parent: bytes, ids: bytes, block_size: int, extras: ExtrasOf | None = None, first_block: int = 0
) -> list[bytes]:
    """Keys of the whole blocks in `ids` (of `token_bytes`), which follow the block whose key is `parent`.

    first_block: index of the first of them in the whole prompt, by which `extras` is asked.
    """
    if len(parent) != KEY_BYTES:
        raise NotCacheable(f"a parent key has {KEY_BYTES} bytes, not {len(parent)}; start a chain from an identity")
    width = 4 * block_size
    # as `_packed` writes two parts, of which the second is empty where a block has no extras
    head, tail = pack("<QQ", 2, width), _NO_EXTRAS
    find = _finder(extras) if extras else None
    keys = []
    for block, at in enumerate(range(0, len(ids), width), first_block):
        if find is not None:
            tagged = _tagged(find(block) or (), block)
            tail = _u64(len(tagged)) + tagged
        parent = sha256(_BLOCK + parent + head + ids[at : at + width] + tail).digest()
        keys.append(parent)
    return keys


def _finder(extras: ExtrasOf) -> Callable[[int], Sequence[Extra] | None]:
    return extras if callable(extras) else extras.get


def _at(extra: Extra, offset: int) -> Extra:
    """The extra of a part `offset` tokens into a block. One without a digest stays so, and is refused."""
    return msgspec.structs.replace(extra, digest=extra.digest and _packed([extra.digest, _text(offset)]))


def token_bytes(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids as little-endian int32. A negative id is an engine's placeholder, so no content."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise NotCacheable(f"token ids must be a flat list of integers in 0..{MAX_TOKEN}, not {tokens.dtype}")
        tokens = tokens.tolist()
    try:
        ids = pack(f"<{len(tokens)}i", *tokens)
    except StructError as error:
        raise NotCacheable(f"token ids must be integers in 0..{MAX_TOKEN}: {error}") from error
    if not ids[3::4].isascii():  # a sign bit
        raise NotCacheable(f"token id {min(tokens)} is outside 0..{MAX_TOKEN}; its block gets no key")
    if tokens and isinstance(tokens[0], bool):  # these pass for integers
        raise NotCacheable(f"token ids must be integers in 0..{MAX_TOKEN}, not {type(tokens[0]).__name__}")
    return ids


def _tagged(extras: Sequence[Extra], block: int) -> bytes:
    """A block's extras in one order, each with its kind."""
    if not extras:
        return b""
    coded = []
    for extra in extras:
        if not extra.digest:
            raise NotCacheable(f"block {block}: {extra.kind} without a digest can't be named; give one, or don't cache")
        if extra.kind is ExtraKind.MEDIA and extra.offset is None:
            raise NotCacheable(f"block {block}: media need the offset of their first token in the block")
        offset = b"" if extra.offset is None else _text(extra.offset)
        coded.append(_packed([_text(extra.kind), extra.digest, offset]))
    return _packed(sorted(coded))


def _packed(parts: Sequence[bytes]) -> bytes:
    """Parts behind their number and lengths (little-endian uint64): equal only for equal lists."""
    return b"".join([_u64(len(parts)), *(piece for part in parts for piece in (_u64(len(part)), part))])


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _text(value: object) -> bytes:
    return str(value).encode()
