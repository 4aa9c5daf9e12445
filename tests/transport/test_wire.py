from hypothesis import given
from hypothesis import strategies as st

from layercast.transport.wire import chunks


@given(sizes=st.lists(st.integers(0, 40), max_size=12), most=st.integers(1, 50))
def test_chunks_are_the_same_bytes_in_order_and_of_the_asked_size(sizes, most):
    data = [bytes([i]) * size for i, size in enumerate(sizes)]
    parts = list(chunks([memoryview(part) for part in data], most))
    assert b"".join(b"".join(part) for part in parts) == b"".join(data)
    assert all(sum(map(len, part)) == most for part in parts[:-1])
    assert all(0 < sum(map(len, part)) <= most for part in parts[-1:])
