"""What copies cost: their ways and directions, figures for each, and the form of the file where they are kept.

Light, so that whoever only reads such a file loads nothing else. Does not know how costs are measured or weighed.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec


class Way(StrEnum):
    """How a batch moves."""

    ENGINE = "engine"
    """The copy engine alone, piece by piece, in few calls."""
    STAGED = "staged"
    """Long copies between host memory and a staging buffer; a small kernel between that and the blocks."""
    KERNEL = "kernel"
    """A kernel that reads one memory and writes the other."""


class Direction(StrEnum):
    """From where to where; copies of one direction keep their order."""

    UP = "up"
    """Host to device."""
    DOWN = "down"
    """Device to host."""
    LOCAL = "local"
    """Inside the device, or inside the host."""
    PEER = "peer"
    """From the device into the memory of another one that it reaches by itself."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What one direction of one link costs, in a step of many batches.

    gbps: 1e9 bytes a second of a long copy; piece_us: least microseconds of the copy engine for one piece; row_us: for
    one that goes by a kernel; kernel_gbps: what a kernel reaches on the link, beside compute where the host is one end.
    forced: take this way wherever it can be taken, whatever it costs (to measure it).
    """

    gbps: float
    piece_us: float
    row_us: float
    kernel_gbps: float
    forced: Way | None = None


DEFAULT_COSTS = {
    Direction.UP: Costs(50.0, 1.0, 0.2, 16.0),
    Direction.DOWN: Costs(50.0, 0.9, 0.2, 16.0),
    Direction.LOCAL: Costs(1000.0, 4.0, 0.1, 800.0),
    Direction.PEER: Costs(300.0, 1.2, 0.1, 300.0),
}
"""H100s on PCIe 5.0 x16 and NVLink, where nothing was measured (see cuda_costs)."""


def only(way: Way) -> dict[Direction, Costs]:
    """Costs by which `way_of` takes `way` wherever it can be taken."""
    return {direction: replace(costs, forced=way) for direction, costs in DEFAULT_COSTS.items()}


class CostFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of one device. kernel: whether there was one. links: costs by "up", "down", "local", "peer UUID"."""

    device: str
    driver: int
    layercast: str
    kernel: bool
    links: dict[str, Costs]

    def __post_init__(self) -> None:
        for costs in self.links.values():
            figures = (costs.gbps, costs.piece_us, costs.row_us, costs.kernel_gbps)
            if costs.forced is not None or not all(math.isfinite(figure) and figure > 0 for figure in figures):
                raise ValueError("costs are four positive numbers")
