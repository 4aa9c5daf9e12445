"""32-bit words in raw memory that a device writes and the host reads, or the other way round.

Does not know what they stand for.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array lies, without the object that `array.ctypes` makes."""
    address: int = array.__array_interface__["data"][0]
    return address


def words_at(address: int, count: int) -> Words:
    """A view of words in raw memory. Whoever owns it must keep it alive."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))
