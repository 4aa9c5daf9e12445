"""Which way a batch of pieces should go between two memories, from its shape and a few measured costs. Pure.

Does not know streams, kernels or addresses of tensors.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layercast.move.costs import Costs, Way
from layercast.plan.pieces import Pieces

Ints = npt.NDArray[np.int64]
COPY_US, LAUNCH_US = 0.3, 10.0
"""What a copy costs beside its time on the device, unless no thread launches meanwhile, and a staged batch.

To hand a copy over keeps the driver to itself for 0.9 us, of which others lose a part: a thread that launches waits
for the call under way, 128 copies. On an H200 a launch took 81 us beside 16,384 copies of 64 KiB, else 7. What is
staged goes in few calls, and makes a raw forward that waits for it 1 to 4 % slower than by the engine. Hits of 8,192
scattered tokens and 512 new ones in vLLM, staged and by the engine: 25.8 and 25.6 ms; with 32 hardware queues on two
quick hosts 26.6 and 25.4, 26.5 and 25.4, on a slow one 28.6 and 31.0 while staging still took three streams, and the
longest step of 32 that decode beside them 41 and 47. Saves beside matrix products kept 0.95 of a contiguous copy's rate
staged, 0.84 by the engine; on a slow host 0.89 and 0.90."""
SHARE, EDGE = 1.05, 1.25
"""What staging counts for of its time, and the kernel over a link: their programs take the model's place on the device.
From an H200 such a kernel made matrix products 30 % slower, what is staged 2 % more than a contiguous copy did, and to
it 3 %."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Pieces without runs: one row a copy, none of them empty. table: int64 [3, rows], the first of COLUMNS."""

    table: Ints

    def __len__(self) -> int:
        return len(self.table[0])

    @property
    def source(self) -> Ints:
        """Where each copy begins on the source."""
        return self._row(0)

    @property
    def target(self) -> Ints:
        """Where each copy begins on the target."""
        return self._row(1)

    @property
    def length(self) -> Ints:
        """Bytes of each copy."""
        return self._row(2)

    def take(self, index: "slice | Ints") -> "Rows":
        """The chosen rows."""
        return Rows(self.table[:, index])

    def _row(self, nth: int) -> Ints:
        row: Ints = self.table[nth]
        return row


def rows_of(pieces: Pieces) -> Rows:
    """Pieces as rows, those of each together and in order."""
    source, target, length, count, source_stride, target_stride = table = pieces.placed
    if (count == 1).all() and length.all():
        return Rows(table[:3])
    count = np.where(length > 0, count, 0)
    index = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    from_, to = source[index] + nth * source_stride[index], target[index] + nth * target_stride[index]
    return Rows(np.stack([from_, to, length[index]]))


def stretches(address: Ints, length: Ints) -> tuple[Ints, Ints]:
    """(order by address, for each row in that order the number of its unbroken stretch of memory)."""
    order = np.argsort(address, kind="stable")
    at, nbytes = address[order], length[order]
    breaks = at[1:] != at[:-1] + nbytes[:-1]
    return order, np.concatenate([np.zeros(1, np.int64), np.cumsum(breaks)])


def surely_engine(size: tuple[int, int], costs: Costs, *, idle: bool = False) -> bool:
    """Whether `way_of` will say so of pieces of that size wherever they lie: to see that takes microseconds, a look at
    where all rows lie tens.

    No way is faster than the link, or than the kernel over it.
    """
    if costs.forced is not None:
        return costs.forced is Way.ENGINE
    nbytes, count = size
    staged, kernel = SHARE * (nbytes / costs.gbps / 1e3) + LAUNCH_US, EDGE * (nbytes / costs.kernel_gbps / 1e3)
    return _engine_us(nbytes, count, costs, idle) <= min(staged, kernel)


def _engine_us(nbytes: int, count: int, costs: Costs, idle: bool) -> float:
    """What the copy engine takes, and costs beside."""
    return max(nbytes / costs.gbps / 1e3, count * costs.piece_us) + count * _copy_us(idle)


def _copy_us(idle: bool) -> float:
    """What a copy costs beside its time."""
    return 0.0 if idle else COPY_US


def way_of(size: tuple[int, int], costs: Costs, *, kernel: bool, runs: int = 0, idle: bool = False) -> Way:
    """The way expected to cost least time.

    size: (bytes, copies) of pieces. kernel: whether there is one and it can move them. runs: the unbroken stretches
    that they make in host memory; 0 = they can't be staged. idle: no thread launches (`Waits.IDLE`).
    """
    nbytes, count = size
    if count < 2 or not kernel:
        return Way.ENGINE
    if costs.forced is not None:
        return Way.ENGINE if costs.forced is Way.STAGED and not runs else costs.forced
    link_us, row_us = nbytes / costs.gbps / 1e3, count * costs.row_us
    took = {Way.ENGINE: _engine_us(nbytes, count, costs, idle)}
    if runs:
        staged_us = SHARE * max(link_us, row_us, runs * costs.piece_us)
        took[Way.STAGED] = staged_us + runs * _copy_us(idle) + LAUNCH_US
    took[Way.KERNEL] = EDGE * max(nbytes / costs.kernel_gbps / 1e3, row_us)
    return min(took, key=lambda way: took[way])
