from hypothesis import given
from hypothesis import strategies as st

from layercast.store.coverage import Coverage

SIZE = 40
ranges = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)


@given(st.lists(ranges, max_size=12))
def test_coverage_counts_each_written_byte_once(written):
    coverage, seen = Coverage(SIZE), set()
    for start, end in written:
        coverage.add(start, end)
        seen |= set(range(start, end))
        assert coverage.covered == len(seen)
        assert coverage.whole == (len(seen) == SIZE)
