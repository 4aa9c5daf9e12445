"""One kernel: copy many pieces, each from its own address to its own address, with a bounded number of programs.

It scatters a staging buffer over blocks, gathers blocks into one, and writes another GPU's memory. Few programs on
purpose where a launch lasts as long as a link takes: they run beside a model, and a link is full long before a GPU is.
Does not know what the pieces are.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from layercast.errors import Refused
from layercast.move.kernels.pieces_host import BLOCK, MULTIPLES, PARAMETERS, Scribe, best_scribe, odd

Ints = npt.NDArray[np.int64]

WARPS = 8


@dataclass(frozen=True, slots=True)
class PieceKernel:
    """The compiled kernel as the driver launches it; `owner` keeps it loaded."""

    function: int
    threads: int
    shared: int
    scribe: Scribe
    owner: Any

    def values(self, tables: Ints, shifts: Ints) -> tuple[Ints, int]:
        """Its parameters in each launch, int64 [launches, PARAMETERS], and their address.

        tables: int64 [count, 4] as in `Scribe.launch`, what the launches copy in turn, over and over. shifts: int64
        [launches, 2], bytes to add to sources and targets. The compiled code relies on rows at multiples of 16 bytes,
        and on such addresses.
        """
        given = np.empty((len(shifts), PARAMETERS), np.int64)
        address = self.scribe.launch(given, tables, shifts)
        assert address, MULTIPLES
        return given, address


def copy_reference(source: Ints, target: Ints, length: Ints) -> None:
    """What the kernel does, in host memory, a piece at a time."""
    assert not any(map(odd, (source, target, length))), MULTIPLES
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
    return PieceKernel(int(made.function), 32 * WARPS, int(made.metadata.shared), best_scribe(), made)


def compiled_or_none(device: int) -> PieceKernel | None:
    """As `compiled`; None where that is refused."""
    try:
        return compiled(device)
    except Refused:
        return None
