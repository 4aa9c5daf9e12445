"""Where batches lie, as a driver sees it: which direction they go, and whether the device reaches both ends by itself.

Does not know streams, programs or flights.
"""

from collections.abc import Sequence

from layercast.move.costs import Direction
from layercast.move.cuda_driver import DEVICE, PAGEABLE, Driver
from layercast.move.cuda_pin import Pinning
from layercast.plan.pieces import Series, Side

_HOST: dict[Direction, tuple[Side, ...]] = {
    Direction.UP: ("source",),
    Direction.DOWN: ("target",),
    Direction.LOCAL: ("source", "target"),
    Direction.PEER: (),
}
"""Sides that lie in host memory; of a batch that is local both do, or none."""
_ROW: dict[Side, int] = {"source": 0, "target": 1}


def direction_of(driver: Driver, batches: Sequence[Series]) -> Direction:
    """The direction of the first that has any pieces. The calling thread has bound the driver."""
    first = next((batch for batch in batches if len(batch.pieces)), None)
    if first is None:
        return Direction.LOCAL
    ends = _first(first, "target"), _first(first, "source")
    up, down = (driver.kind_of(end) == DEVICE for end in ends)
    if up and down:
        elsewhere = any(driver.device_of(end) != driver.device for end in ends)
        return Direction.PEER if elsewhere else Direction.LOCAL
    return Direction.LOCAL if up == down else Direction.UP if up else Direction.DOWN


def all_pinned(driver: Driver, pinnings: Sequence[Pinning], direction: Direction, batches: Sequence[Series]) -> bool:
    """Whether the device reaches all of it: a slab is pinned from its start on, so the ends say so."""
    host = _HOST[direction]
    if len(host) == 1 and (first := next((batch for batch in batches if len(batch.pieces)), None)) is not None:
        at = _first(first, host[0])
        if any(pinning.done and at in pinning for pinning in pinnings):
            return True  # asking for each end again would cost more than writing the program
    if direction is Direction.LOCAL:
        batches = [batch for batch in batches if len(batch.pieces) and not _inside(driver, batch)]
    ends = [end for side in host for batch in batches for end in _ends(batch, side)]
    return all(driver.kind_of(end) != PAGEABLE for end in ends and (min(ends), max(ends)))


def _inside(driver: Driver, series: Series) -> bool:
    """Whether it is inside the device. It has pieces."""
    return driver.kind_of(_first(series, "source")) == DEVICE == driver.kind_of(_first(series, "target"))


def _first(series: Series, side: Side) -> int:
    """Where the first piece of the first part begins."""
    nth = _ROW[side]
    return series.pieces.table.item(nth, 0) + series.shifts.item(0, nth)


def _ends(series: Series, side: Side) -> tuple[int, ...]:
    """Its first and its last address on one side, if it has any pieces."""
    nth = _ROW[side]
    array, shifts = series.pieces.table[nth], series.shifts[:, nth]
    return (int(array.min() + shifts.min()), int(array.max() + shifts.max())) if len(array) else ()
