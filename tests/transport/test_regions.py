import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercast.errors import Malformed, Refused
from layercast.transport.base import Peer
from layercast.transport.regions import Regions, views

ONE, OTHER = Peer(1, "a"), Peer(2, "a")


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.sampled_from([None, ONE, OTHER])), max_size=6),
    ranges=st.lists(st.tuples(st.integers(-5, 150), st.integers(-2, 30)), min_size=1, max_size=6),
)
def test_a_claim_holds_exactly_when_each_range_lies_in_one_region_that_is_open_to_the_peer(sizes, ranges):
    regions, owners, at = Regions(), {}, 10
    for gap, size, writer in sizes:
        at += gap
        region = regions.register(at, size, f"owner {at}", writer)
        if writer is not OTHER:
            owners[region] = f"owner {at}"
        at += size
    holders = []
    for address, length in ranges:
        found = [
            owner
            for region, owner in owners.items()
            if length > 0 and region.address <= address and address + length <= region.address + region.nbytes
        ]
        holders.append(found)
    address, length = (np.array(column, np.int64) for column in zip(*ranges, strict=True))
    if all(holders):
        assert sorted(regions.claim(ONE, address, length)) == sorted({found[0] for found in holders})
    else:
        with pytest.raises(Malformed):
            regions.claim(ONE, address, length)


def test_a_region_may_be_registered_again_after_it_was_forgotten():
    regions = Regions()
    region = regions.register(100, 10, None, None)
    with pytest.raises(Refused):
        regions.register(109, 1, None, None)
    regions.unregister(region)
    assert regions.register(109, 1, None, None).id != region.id


def test_views_write_where_they_say():
    memory = np.zeros(100, np.uint8)
    base = memory.ctypes.data
    assert views(np.zeros(0, np.int64), np.zeros(0, np.int64)) == []
    for view, value in zip(views(np.array([base + 50, base + 3]), np.array([2, 4])), (1, 2), strict=True):
        view[:] = bytes([value]) * len(view)
    assert memory.nonzero()[0].tolist() == [3, 4, 5, 6, 50, 51]
    assert memory[[3, 50]].tolist() == [2, 1]
