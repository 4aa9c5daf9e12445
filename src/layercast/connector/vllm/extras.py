"""What besides its tokens decides a request's KV: adapters, media, salts, as extras with digests.

vLLM's own function finds which blocks have extras; each is then named by content. Does not know keys or the pool.
"""

from hashlib import sha256
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from layercast.connector.vllm.versions import extra_keys
from layercast.errors import NotCacheable
from layercast.spec.keys import Extra, ExtraKind

READ_BYTES = 1 << 20


Files = tuple[tuple[str, int, int], ...]
"""Path, bytes and time of change of each."""


class Adapters:
    """Digests of adapters' files, each read once for as long as it does not change."""

    def __init__(self) -> None:
        self._digests: dict[Files, bytes] = {}
        self._first: dict[int, Files] = {}
        """What an adapter's files were when it was first used, by vLLM's number of it."""

    def digest(self, adapter: LoRARequest) -> bytes:
        """Digest of an adapter's files. Raises NotCacheable where they can't be read, or may not be what was loaded.

        vLLM loads a number once, and again when it has had to drop it.
        """
        folder = Path(adapter.lora_path)
        if not adapter.lora_path or not folder.is_dir():
            raise NotCacheable(f"adapter {adapter.lora_name!r}: {adapter.lora_path!r} is no local folder to digest")
        if adapter.load_inplace:
            raise NotCacheable(
                f"adapter {adapter.lora_name!r} is reloaded in place, so its files may not be its weights"
            )
        files = sorted(path for path in folder.iterdir() if path.is_file())
        facts = tuple((str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files)
        if self._first.setdefault(adapter.lora_int_id, facts) != facts:
            raise NotCacheable(
                f"adapter {adapter.lora_name!r}: its files have changed since it was loaded; load it again, as another"
            )
        if facts not in self._digests:
            whole = sha256()
            for path in files:
                whole.update(f"{path.name} {path.stat().st_size} ".encode())
                with path.open("rb") as file:
                    while part := file.read(READ_BYTES):
                        whole.update(part)
            self._digests[facts] = whole.digest()
        return self._digests[facts]


def extras_of(request: Request, adapters: Adapters, block_size: int, salt: str = "") -> dict[int, list[Extra]]:
    """Block index (of `block_size` tokens) to its extras; a chain needs an adapter and a salt in block 0 alone.

    salt: asked for by the request itself, beside vLLM's own. Raises NotCacheable for what can't be named by content.
    """
    if request.prompt_embeds is not None:
        raise NotCacheable(f"{request.request_id}: prompt embeddings are not cached")
    if request.resumable:
        raise NotCacheable(f"{request.request_id}: a session whose tokens may still change is not cached")
    found: dict[int, list[Extra]] = {}
    if salt:
        found[0] = [Extra(ExtraKind.SALT, b"request " + salt.encode())]
    if request.lora_request is None and not request.mm_features and not request.cache_salt:
        return found
    medium = 0
    for block in range(-(-request.num_prompt_tokens // block_size)):
        keys, medium = extra_keys(request, block * block_size, (block + 1) * block_size, medium)
        named = [_extra(request, key, adapters) for key in keys if block == 0 or key[0] != "lora"]
        if named:
            found.setdefault(block, []).extend(named)
    return found


def _extra(request: Request, key: tuple[object, ...], adapters: Adapters) -> Extra:
    match key:
        case ("mm", str(identifier), int(offset)):
            return Extra(ExtraKind.MEDIA, identifier.encode(), offset)
        case ("lora", *_) if request.lora_request is not None:
            return Extra(ExtraKind.ADAPTER, adapters.digest(request.lora_request))
        case ("cache_salt", str(salt)):
            return Extra(ExtraKind.SALT, salt.encode())
    raise NotCacheable(f"{request.request_id}: a block depends on {key[0]!r}, which has no name here")
