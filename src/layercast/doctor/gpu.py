"""NVIDIA cards here: what they are, how they hang on this machine, and what copies over that link cost.

Reads the driver's files, and those where costs are kept. Imports no torch, opens no card, measures nothing.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from layercast import __version__
from layercast.doctor.checks import Check, Level
from layercast.move.costs import CostFile

DRIVER = "proc/driver/nvidia"
HIDES_ALL = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that leave no card."""
CUDAS_OWN = "8"
"""Hardware queues where CUDA_DEVICE_MAX_CONNECTIONS does not say otherwise. With 32 hits of 8,192 tokens took 7 to 8 ms
longer in vLLM, in a process that was out of luck."""
FEW = ("1", "2")
"""Hardware queues with which what is staged was seen to wait behind a save that waits for its layer."""


class Card(msgspec.Struct, frozen=True):
    """One card. link: to the host; costs: what its copies cost, as kept. Both are empty where they are not known."""

    name: str
    link: str = ""
    costs: str = ""


def cards(cache: Path, root: Path = Path("/")) -> tuple[Card, ...]:
    """The cards whose device files are here, by number. cache: the folder where costs are kept."""
    told = [_fields(path) for path in (root / DRIVER).glob("gpus/*/information")]
    known = {fields.get("Device Minor"): fields for fields in told}
    numbers = sorted(int(path.name[6:]) for path in root.glob("dev/nvidia*") if path.name[6:].isdigit())
    return tuple(_card(known.get(str(number), {}), cache, root) for number in numbers)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _card(fields: dict[str, str], cache: Path, root: Path) -> Card:
    bus = root / "sys/bus/pci/devices" / fields.get("Bus Location", "unknown").lower()
    speed, width = (_text(bus / name) for name in ("max_link_speed", "max_link_width"))
    link = f"{speed} x{width}" if speed and width else ""
    uuid = fields.get("GPU UUID", "unknown").removeprefix("GPU-").replace("-", "")  # "?" where it is not told yet
    found = (_costs(path) for path in sorted(cache.glob(f"costs-{uuid}.json")))
    return Card(fields.get("Model", "an NVIDIA card"), link, next(filter(None, found), ""))


def _costs(path: Path) -> str:
    """Speeds of the links in a file of costs; empty for a file that the next start would not use either."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=CostFile)
    except (OSError, msgspec.MsgspecError):
        return ""
    speeds = ", ".join(f"{name.split()[0]} {costs.gbps:.0f}" for name, costs in kept.links.items())
    return speeds if kept.layercast == __version__ else ""


def judge_cards(driver: bool, found: Sequence[Card], visible: str | None, queues: str | None, compiles: bool) -> Check:
    """driver: whether NVIDIA's is loaded. visible, queues: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_MAX_CONNECTIONS, None
    where they are not set. compiles: there is numba, which compiles the loop that issues copies."""
    if not driver:
        none = "No NVIDIA driver: engines run on the CPU. layercast bench needs a card (containers: --gpus all)."
        return Check("gpu", Level.OK, none)
    if not found:
        none = "NVIDIA's driver is here, but no card is given to this system."
        return Check("gpu", Level.WARNING, none, "Containers: start with --gpus all.")
    names = [card.name for card in found]
    each = [
        f"{names.count(name)} x {name} ({card.link or 'link not known'}; {_told(card)})"
        for name, card in {card.name: card for card in reversed(found)}.items()
    ]
    said = "; ".join(each)
    if visible is not None and visible.strip() in HIDES_ALL:
        hidden = f"{said}, but CUDA_VISIBLE_DEVICES = {visible!r} hides them from torch."
        return Check("gpu", Level.WARNING, hidden, "Unset it.")
    if not compiles:
        slow = f"{said}; numba is missing, without which Python issues every copy: a third of the link's speed."
        return Check("gpu", Level.WARNING, slow, "pip install numba")
    if queues not in (None, CUDAS_OWN):
        why = "with 1 or 2 copies hold up others" if queues in FEW else f"CUDA's own {CUDAS_OWN} were quicker than 32"
        other = f"{said}; CUDA_DEVICE_MAX_CONNECTIONS = {queues!r}: {why} (H200)."
        return Check("gpu", Level.NOTE, other, "Unset it, unless something else needs it.")
    return Check("gpu", Level.OK, f"{said}.")


def _told(card: Card) -> str:
    if not card.costs:
        return "copies not measured yet: the first engine on it does, within two seconds"
    return f"copies measured, in GB/s: {card.costs}"
