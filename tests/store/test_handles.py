from hypothesis import given
from hypothesis import strategies as st

from layercast.store.handles import covered

ranges = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)


@given(st.lists(ranges, max_size=12))
def test_each_written_byte_counts_once(written):
    assert covered(written) == len({byte for start, end in written for byte in range(start, end)})
