import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layercast.move.cuda_program import cut


@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(1, 90)), max_size=6),
    cuts=st.sets(st.integers(0, 300), max_size=6),
)
def test_cut_copies_move_the_same_bytes_and_cross_no_cut(rows, cuts):
    address, other, length = (
        (np.array(column, np.int64) for column in zip(*rows, strict=True)) if rows else [np.zeros(0, np.int64)] * 3
    )
    at = np.array(sorted(cuts), np.int64)
    parts = list(zip(*(column.tolist() for column in cut(address, other, length, at)[1:]), strict=True))
    moved = [(a + i, b + i) for a, b, n in parts for i in range(n)]
    assert moved == [(a + i, b + i) for a, b, n in rows for i in range(n)]
    assert all(n > 0 and not any(a < c < a + n for c in cuts) for a, _, n in parts)
