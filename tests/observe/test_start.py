import pytest

from layercast import __version__
from layercast.config import Config
from layercast.observe.start import start_line


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "layer by layer"),
        ({"layerwise_window": 4}, "in windows of 4 layers"),
        ({"use_layerwise": False, "layerwise_window": 4}, "in bulk"),
        ({"disk_path": "/kv", "disk_bytes": 1 << 30}, "1.0 GiB a rank in /kv"),
        ({"disk_path": ""}, "no disk_path"),
    ],
)
def test_the_first_line_in_a_log_tells_what_the_pool_is_set_to(settings, says):
    line = start_line(Config(host_bytes=3 << 30, **settings), "kv_both", "LBHNC")
    assert line.startswith(f"layercast {__version__} ")
    assert all(word in line for word in (says, "kv_both", "3.0 GiB of host memory", "LBHNC"))
    assert "\n" not in line
