"""Element types by name, and their sizes. Does not know numpy's or torch's types."""

from layercast.errors import UnknownDtype

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}


def item_bytes(dtype: str, owner: str = "plane") -> int:
    """Bytes of one element of `dtype`; `owner` is named in the error.

    Raises UnknownDtype, with the known names.
    """
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise UnknownDtype(f"{owner}: unknown dtype {dtype!r}; known: {', '.join(ITEM_BYTES)}")
    return size
