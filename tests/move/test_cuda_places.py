"""Where batches lie, as a driver sees it."""

import numpy as np
import pytest
from host_device import HostDevice

from layercast.move.costs import Direction
from layercast.move.cuda_places import all_pinned
from layercast.plan.pieces import Series
from layercast.testing.move_laws import pieces_of

FAR = 1 << 30


@pytest.mark.parametrize("direction", [Direction.UP, Direction.DOWN])
@pytest.mark.parametrize("shift", [FAR, -FAR])
def test_memory_that_a_device_does_not_reach_is_seen_in_any_of_the_batches_that_share_their_pieces(direction, shift):
    device, up = HostDevice(), direction is Direction.UP
    host, inside = device.host_memory(1 << 12), device.device_memory(1 << 12)
    pieces = pieces_of((host, inside, 64) if up else (inside, host, 64))
    near = [Series(pieces, np.array([[at, at]])) for at in (0, 64, 128)]
    far = Series(pieces, np.array([[shift, 0] if up else [0, shift]]))
    assert all_pinned(device, (), direction, near)
    for place in range(4):
        assert not all_pinned(device, (), direction, [*near[:place], far, *near[place:]])
