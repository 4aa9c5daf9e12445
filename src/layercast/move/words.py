"""32-bit words in raw memory that a device writes and the host reads, or the other way round.

Does not know what they stand for.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

_NOTHING = ctypes.c_char * 0
Words = npt.NDArray[np.int32]


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array without gaps lies: of one that may be written, without the object that `array.ctypes` makes."""
    return ctypes.addressof(_NOTHING.from_buffer(array.data)) if array.flags.writeable else array.ctypes.data


def counts_at(address: int, count: int) -> memoryview:
    """The same as unsigned numbers, for who reads one now and then: numpy takes 10 us where its code is cold. Likewise
    alive."""
    return memoryview((ctypes.c_uint32 * count).from_address(address)).cast("B").cast("I")


def words_at(address: int, count: int) -> Words:
    """A view of words in raw memory. Whoever owns it must keep it alive."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))
