"""What `layercast bench` runs: a measurement by name, on the devices that it needs. Importable without torch."""

import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from layercast import __version__
from layercast.bench.results import Report, Table, What
from layercast.errors import BadSetting, Refused

if TYPE_CHECKING:
    from layercast.bench.ground import Device

PACKAGES = ("torch", "triton", "numba", "vllm", "sglang-kernel", "lmcache")
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Which CUDA reads once, when a device is first used."""
LENGTHS = ((8192, 2048), (8192, 512), (2048, 256))
"""(cached, new) tokens unless told otherwise."""
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """what: which. tokens: in `layers` and `peer`; block: tokens in one; lengths: (cached, new), in the others.

    `busy` takes the first length. brief: in `layers` and `overlap`, only what an engine would take, and its limits.
    """

    what: What
    tokens: int = 8192
    block: int = 16
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    repeats: int = 15
    brief: bool = False


def lengths_of(texts: list[str]) -> tuple[tuple[int, int], ...]:
    """(cached, new) from "8192+512". Raises BadSetting."""
    found = []
    for text in texts:
        cached, plus, new = text.partition("+")
        if not (plus and cached.isdecimal() and new.isdecimal() and int(cached) and int(new)):
            raise BadSetting(f"shape {text!r}: write it as cached+new tokens, such as 8192+512")
        found.append((int(cached), int(new)))
    return tuple(found)


def run(options: Options, say: Callable[[str], None], keep: Callable[[Report], object]) -> Report:
    """Measure; `say` hears of every table, `keep` gets the report so far. Raises Refused where there is no GPU."""
    devices = machine(options.what)
    began, tables = time.perf_counter(), []
    report = Report(
        command=_command(options), card=_cards(devices), versions=versions(devices[0]), tables=(), took_s=0.0
    )
    for table in _tables(options, devices):
        tables.append(table)
        took_s = time.perf_counter() - began
        say(f"{took_s:.0f} s: {table.title}")
        report = msgspec.structs.replace(report, tables=tuple(tables), took_s=took_s)
        keep(report)
    return report


def machine(what: What) -> "list[Device]":
    """All devices where more than one is needed, else the first. Raises Refused where there are too few."""
    least = 2 if what is What.PEER else 1
    if what is What.GRAPH:  # streams that wait for flags must not share a hardware queue with those that set them
        os.environ.setdefault(QUEUES, "32")
    if importlib.util.find_spec("torch") is None:
        raise Refused("layercast bench needs torch: pip install '.[transformers]' in the clone")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < least:
        seen = "none" if not count else str(count)
        raise Refused(
            f"this measures {least} NVIDIA GPU{'s' if least > 1 else ''} and torch sees {seen} here; "
            "`layercast demo` needs no GPU, `layercast doctor` says what is missing"
        )
    from layercast.bench.ground import Device

    return [Device.of(number) for number in range(count if least > 1 else 1)]


def versions(device: "Device") -> Mapping[str, str]:
    """Of this package, Python, the drivers, and those of PACKAGES that are installed; and how many hardware queues."""
    found = {"layercast": __version__, "python": platform.python_version(), "cuda": str(device.driver.version)}
    found["hardware queues"] = os.environ.get(QUEUES, "CUDA's own")
    if _DRIVER.is_file():
        words = _DRIVER.read_text().split("Module")[-1].split()
        found["nvidia driver"] = next((word for word in words if word[:1].isdigit()), "unknown")
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _tables(options: Options, devices: "list[Device]") -> Iterator[Table]:
    from layercast.bench.ground import Shape

    shape = Shape(block=options.block)
    if options.what is What.LAYERS:
        from layercast.bench.layers import layers

        return layers(devices[0], shape, options.tokens, options.repeats, brief=options.brief)
    if options.what is What.OVERLAP:
        from layercast.bench.overlap import overlap

        return overlap(devices[0], shape, options.lengths, options.repeats, brief=options.brief)
    if options.what is What.BUSY:
        from layercast.bench.busy import busy

        return busy(devices[0], shape, options.lengths[0], options.repeats)
    if options.what is What.GRAPH:
        from layercast.bench.graph import graph

        return graph(devices[0], shape, options.lengths, options.repeats)
    from layercast.bench.peer import peer

    return peer(devices, shape, options.tokens, options.repeats)


def _cards(devices: "list[Device]") -> str:
    import torch

    name = torch.cuda.get_device_name(devices[0].number)
    return f"{len(devices)} x {name}" if len(devices) > 1 else str(name)


def _command(options: Options) -> str:
    """The command line that measures this again; where its output went is left out."""
    shapes = [f"--shape {cached}+{new}" for cached, new in options.lengths]
    of = {What.OVERLAP: shapes, What.GRAPH: shapes, What.BUSY: shapes[:1]}
    rest = [*of.get(options.what, [f"--tokens {options.tokens}"]), "--brief" if options.brief else ""]
    words = ["layercast bench", options.what, *rest, f"--block {options.block} --repeats {options.repeats}"]
    return " ".join(filter(None, words))
