from host_device import HostDevice

from layercast.move.cuda_driver import HOST, PAGEABLE
from layercast.move.cuda_pin import Pinning


def test_all_slices_are_pinned_and_unpinned():
    device = HostDevice()
    pinning = Pinning(device, 1 << 20, 10_000, slice_bytes=4096)
    pinning.wait(10)
    assert device.pinned == {1 << 20: 4096, (1 << 20) + 4096: 4096, (1 << 20) + 8192: 1808}
    assert pinning.pinned_bytes == 10_000
    assert not pinning.refusal
    pinning.close(10)
    assert not device.pinned


def test_a_refusal_says_how_far_it_came_and_what_to_do(caplog):
    device = HostDevice()
    device.failing["pin"] = 2
    pinning = Pinning(device, 1 << 20, 10_000, slice_bytes=4096)
    pinning.wait(10)
    assert "8192 of 10000 bytes" in pinning.refusal
    assert "host_bytes" in pinning.refusal
    assert pinning.refusal in caplog.text
    assert (device.kind_of((1 << 20) + 8191), device.kind_of((1 << 20) + 8192)) == (HOST, PAGEABLE)
    pinning.close(10)
    assert not device.pinned


def test_closing_stops_it_and_undoes_what_was_done():
    device = HostDevice()
    pinning = Pinning(device, 1 << 20, 1 << 30, slice_bytes=4096)
    pinning.close(10)
    assert not device.pinned
    assert pinning.pinned_bytes == 0
