"""Where batches lie, as a driver sees it: which direction they go, and whether the device reaches both ends by itself.

Does not know streams, programs or flights.
"""

from collections.abc import Sequence

from layercast.move.costs import Direction
from layercast.move.cuda_driver import DEVICE, PAGEABLE, Driver
from layercast.move.cuda_pin import Pinning
from layercast.plan.pieces import Pieces, Side

_HOST: dict[Direction, tuple[Side, ...]] = {Direction.UP: ("source",), Direction.DOWN: ("target",)}


def direction_of(driver: Driver, batches: Sequence[Pieces]) -> Direction:
    """The direction of the first that has any pieces. The calling thread has bound the driver."""
    first = next((pieces for pieces in batches if len(pieces)), None)
    if first is None:
        return Direction.LOCAL
    ends = _first(first, "source"), _first(first, "target")
    down, up = (driver.kind_of(end) == DEVICE for end in ends)
    if up and down:
        elsewhere = any(driver.device_of(end) != driver.device for end in ends)
        return Direction.PEER if elsewhere else Direction.LOCAL
    return Direction.LOCAL if up == down else Direction.UP if up else Direction.DOWN


def all_pinned(driver: Driver, pinnings: Sequence[Pinning], direction: Direction, batches: Sequence[Pieces]) -> bool:
    """Whether the device reaches all of it: a slab is pinned from its start on, so the ends say so."""
    host = _HOST.get(direction, ("source", "target"))
    first = next((pieces for pieces in batches if len(pieces)), None)
    if first is not None and len(host) == 1:
        at = _first(first, host[0])
        if any(pinning.done and at in pinning for pinning in pinnings):
            return True  # asking for each end again would cost more than writing the program
    ends = [end for side in host for end in _ends(batches, side)]
    return all(driver.kind_of(end) != PAGEABLE for end in ends and (min(ends), max(ends)))


def _first(pieces: Pieces, side: Side) -> int:
    """Where the first piece begins."""
    array, shift = (pieces.sources, pieces.shift[0]) if side == "source" else (pieces.targets, pieces.shift[1])
    return int(array[0]) + shift


def _ends(batches: Sequence[Pieces], side: Side) -> list[int]:
    """The first and the last address of each batch that has any, on one side; counted once for those that share."""
    nth, ends = (0 if side == "source" else 1), list[int]()
    seen: dict[int, tuple[int, int]] = {}
    for pieces in batches:
        array, shift = (pieces.sources, pieces.targets)[nth], pieces.shift[nth]
        if (edges := seen.get(id(array))) is None and len(array):
            edges = seen[id(array)] = int(array.min()), int(array.max())
        ends += [edge + shift for edge in edges or ()]
    return ends
