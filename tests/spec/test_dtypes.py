import numpy as np
import pytest

from layercast.errors import UnknownDtype
from layercast.spec.dtypes import ITEM_BYTES, item_bytes


def test_sizes_are_those_of_the_types():
    for name, size in ITEM_BYTES.items():
        if not name.startswith(("bfloat", "float8")):
            assert np.dtype(name).itemsize == size
    assert (item_bytes("bfloat16"), item_bytes("float8_e4m3fn")) == (2, 1)


def test_an_unknown_dtype_is_refused_with_its_owner_and_the_known_ones():
    with pytest.raises(UnknownDtype, match=r"layers\.3\.kv: unknown dtype 'int4'; known: float64, .*uint8"):
        item_bytes("int4", "layers.3.kv")
