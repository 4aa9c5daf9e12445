import pytest
from host_device import HostDevice

from layercast.move import cuda_pin
from layercast.move.cuda_driver import HOST, PAGEABLE
from layercast.move.cuda_pin import Pinning, near


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
    assert "ulimit -l is" in pinning.refusal
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


def machine(folder, nodes, node_of_device):
    for node in range(nodes):
        (folder / f"devices/system/node/node{node}").mkdir(parents=True)
    device = folder / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node_of_device)
    return folder


@pytest.mark.parametrize(("nodes", "said", "node"), [(2, "1\n", 1), (1, "0\n", -1), (2, "-1\n", -1), (2, "?", -1)])
def test_memory_comes_from_the_devices_node_where_there_are_several(tmp_path, monkeypatch, nodes, said, node):
    asked = []
    monkeypatch.setattr(cuda_pin, "_prefer", lambda policy, number: asked.append((policy, number)) or True)
    with near("0000:3B:00.0", machine(tmp_path, nodes, said)) as found:
        assert found == node
    assert asked == ([(1, 1), (0, 0)] if node == 1 else [])


def test_a_system_that_refuses_a_node_is_told_of_and_changes_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cuda_pin, "_prefer", lambda policy, number: False)
    with near("0000:3b:00.0", machine(tmp_path, 2, "1")) as found:
        assert found == -1
    assert "set_mempolicy" in caplog.text


def test_this_system_answers_the_call():
    if not cuda_pin._prefer(1, 0):
        pytest.skip("this system lets nobody choose a NUMA node")
    assert cuda_pin._prefer(0, 0)
