"""Which weights a model has, by content: for KV that outlives the process that computed it.

Of every tensor a few bytes are read, of the configuration all: other weights have another digest, wherever they lie.
Does not know the pool.
"""

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from transformers.utils import cached_file
from vllm.config import ModelConfig, VllmConfig

from layercast.errors import UnsupportedModel

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
ELSEWHERE = ("_name_or_path", "transformers_version")
"""What a configuration says that is not of the model."""
SPOT_BYTES = 64
SPOTS = 4096
"""Places read of a file whose tensors are not listed in a header."""


def weights_digest(config: VllmConfig) -> str:
    """A digest of the weights of a model and of its draft. Raises UnsupportedModel where they can't be read here."""
    digest = sha256(config.load_config.load_format.encode())
    models = [config.model_config]
    if config.speculative_config is not None and config.speculative_config.draft_model_config is not None:
        models.append(config.speculative_config.draft_model_config)
    for model in models:
        settings = {name: value for name, value in model.hf_config.to_dict().items() if name not in ELSEWHERE}
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
        for file in _files(model, config.load_config.download_dir):
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb", buffering=0) as data:
                for at in _spots(file, size):
                    digest.update(os.pread(data.fileno(), SPOT_BYTES, at))
    return digest.hexdigest()


def _files(model: ModelConfig, cache: str | None) -> list[Path]:
    path = Path(model.model)
    if path.is_file():
        return [path]
    if not path.is_dir():
        try:
            known = cached_file(
                model.model, "config.json", revision=model.revision, cache_dir=cache, local_files_only=True
            )
        except OSError as error:
            raise _unreadable(model) from error
        path = Path(known).parent
    found = sorted(file for file in path.iterdir() if file.suffix in WEIGHTS)
    if not found:
        raise _unreadable(model)
    return found


def _unreadable(model: ModelConfig) -> UnsupportedModel:
    return UnsupportedModel(
        f"the weights of {model.model!r} are no files here, so KV on disk can't be told from that of other weights; "
        "give a folder with the weights, or unset disk_path"
    )


def _spots(file: Path, size: int) -> Iterator[int]:
    """Where to read: the header of a safetensors file, and the begin, middle and end of each of its tensors."""
    if file.suffix != ".safetensors":
        yield from range(0, size, max(SPOT_BYTES, size // SPOTS))
        return
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        header = json.loads(data.read(length))
    yield from range(0, 8 + length, SPOT_BYTES)
    for name in sorted(header.keys() - {"__metadata__"}):
        start, end = (8 + length + offset for offset in header[name]["data_offsets"])
        yield from (start, (start + end) // 2, max(start, end - SPOT_BYTES))
