"""One kernel: copy many pieces, each from its own address to its own address, with a bounded number of programs.

It scatters a staging buffer over blocks, gathers blocks into one, and writes another GPU's memory. Few programs on
purpose: they run beside a model, and a link is full long before a GPU is. Does not know what the pieces are.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layercast.errors import Refused
from layercast.move.cuda_ways import Rows

Ints = npt.NDArray[np.int64]

WORD_BYTES = 16
BLOCK = 2048
"""64-bit words one program copies in a turn: 16 KiB."""
WARPS = 8


@dataclass(frozen=True, slots=True)
class PieceKernel:
    """The compiled kernel as the driver launches it; `owner` keeps it loaded."""

    function: int
    threads: int
    shared: int
    owner: Any

    def values(self, table: int, columns: int, pieces: int, longest: int) -> Ints:
        """Its parameters, for a batch that starts at `table` in device memory, in a table of so many columns.

        longest: bytes of the longest piece. The compiled code relies on rows at multiples of 16 bytes.
        """
        assert table % WORD_BYTES == 0
        assert columns % 2 == 0
        chunks = -(-longest // (8 * BLOCK))
        # Triton appends pointers to scratch memory, which this kernel has none of.
        return np.array([table, table + 8 * columns, table + 16 * columns, pieces, chunks, 0, 0], np.int64)


def table_of(rows: Rows, batches: int) -> tuple[Ints, Ints, Ints]:
    """(int64 [3, columns]: from, to, 8-byte words of each row; each batch's first column; its rows).

    Each batch starts at an even column, and the number of columns is even. Asserts the alignment.
    """
    assert_aligned(rows.source, rows.target, rows.length)
    counts = np.bincount(rows.batch, minlength=batches)
    wide = counts + counts % 2
    first = np.cumsum(wide) - wide
    at = np.arange(len(rows)) + (first - np.cumsum(counts) + counts)[rows.batch]
    table = np.zeros((3, int(wide.sum())), np.int64)
    for row, column in zip(table, (rows.source, rows.target, rows.length >> 3), strict=True):
        row[at] = column
    return table, first, counts


def assert_aligned(*arrays: Ints) -> None:
    """The kernel moves 16 bytes at a time and never fewer."""
    together = (int(np.bitwise_or.reduce(array, initial=0)) for array in arrays)  # far quicker than a division each
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
            made = copy_pieces.warmup(
                torch.int64, torch.int64, torch.int64, 0, 0, BLOCK=BLOCK, grid=(1,), num_warps=WARPS
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
