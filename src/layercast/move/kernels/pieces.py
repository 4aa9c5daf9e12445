"""One kernel: copy many pieces, each from its own address to its own address, with a bounded number of programs.

It scatters a staging buffer over blocks, gathers blocks into one, and writes another GPU's memory. Few programs on
purpose: they run beside a model, and a link is full long before a GPU is. Does not know what the pieces are.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from layercast.errors import Refused

Ints = npt.NDArray[np.int64]

WORD_BYTES = 16
BLOCK = 2048
"""64-bit words one program copies in a turn: 16 KiB."""
WARPS = 8
PARAMETERS = 9
"""What a launch is given: seven numbers, and two pointers that Triton appends to memory that this kernel needs not."""


@dataclass(frozen=True, slots=True)
class PieceKernel:
    """The compiled kernel as the driver launches it; `owner` keeps it loaded."""

    function: int
    threads: int
    shared: int
    owner: Any

    def values(self, tables: "Sequence[Table]", shifts: Ints) -> Ints:
        """Its parameters in each launch, int64 [launches, PARAMETERS].

        tables: what the launches copy in turn, over and over. shifts: int64 [launches, 2], bytes to add to sources and
        targets. The compiled code relies on rows at multiples of 16 bytes, and on such addresses.
        """
        assert_aligned(shifts)
        assert not any(table.address % WORD_BYTES or table.columns % 2 for table in tables)
        made = np.zeros((len(shifts), PARAMETERS), np.int64)
        for nth, (at, columns, pieces, chunks) in enumerate(tables):
            made[nth :: len(tables), :5] = at, at + 8 * columns, at + 16 * columns, pieces, chunks
        made[:, 5:7] = shifts
        return made


class Table(NamedTuple):
    """What the kernel copies: a table in device memory, its columns, the pieces in it, and turns the longest takes."""

    address: int
    columns: int
    pieces: int
    chunks: int


def even(pieces: int) -> int:
    """Columns of a table of so many pieces: rows begin at multiples of 16 bytes."""
    return pieces + pieces % 2


def table_of(rows: Ints, table: Ints) -> int:
    """Write from, to and 8-byte words of each piece into `table`; the turns that the longest takes.

    rows: int64 [3, pieces], the same with bytes. table: int64 [3, even(pieces)].
    """
    assert_aligned(rows)
    count, words = rows.shape[1], table[2]
    table[:, :count] = rows
    if count < len(words):
        table[:, count:] = 0
    words >>= 3
    return -(-int(np.maximum.reduce(words, initial=0)) // BLOCK)


def assert_aligned(*arrays: Ints) -> None:
    """The kernel moves 16 bytes at a time and never fewer."""
    together = (int(np.bitwise_or.reduce(array, axis=None)) for array in arrays)  # far quicker than a division each
    assert all(not bits % WORD_BYTES for bits in together), "addresses and lengths must be multiples of 16"


def copy_reference(source: Ints, target: Ints, length: Ints) -> None:
    """What the kernel does, in host memory, a piece at a time."""
    assert_aligned(source, target, length)
    for from_, to, nbytes in zip(source.tolist(), target.tolist(), length.tolist(), strict=True):
        ctypes.memmove(to, from_, nbytes)


def compiled(device: int) -> PieceKernel:
    """Compile and load it for a device: a second or so the first time, then from Triton's cache.

    Raises Refused where Triton, or the C compiler that Triton calls, is missing.
    """
    try:
        import torch

        from layercast.move.kernels.pieces_triton import copy_pieces

        with torch.cuda.device(device):
            column, shift = torch.int64, 1 << 40  # a number so large is passed as 64 bits
            made = copy_pieces.warmup(
                column, column, column, 0, 0, shift, shift, BLOCK=BLOCK, grid=(1,), num_warps=WARPS
            )
            made._init_handles()
    except (ImportError, OSError, RuntimeError) as error:
        raise Refused(f"no copy kernel here ({error}); copies go by the copy engine alone") from error
    return PieceKernel(int(made.function), 32 * WARPS, int(made.metadata.shared), made)


def compiled_or_none(device: int) -> PieceKernel | None:
    """As `compiled`; None where that is refused."""
    try:
        return compiled(device)
    except Refused:
        return None
