"""The line in an engine's log that says at its start that the pool is there, and how it is set. Knows settings only."""

from layercast import __version__
from layercast.config import Config, size


def start_line(config: Config, role: str, layout: str) -> str:
    """What the log says at the start. role: as vLLM has it; layout: the order in which KV lies."""
    windows = {0: "in bulk", 1: "layer by layer"}
    window = config.layerwise_window if config.use_layerwise else 0
    how = windows.get(window, f"in windows of {window} layers")
    folder = f"{size(config.disk_bytes)} a rank in {config.disk_path}" if config.disk_path else "no disk_path"
    return (
        f"layercast {__version__} is this engine's pool ({role}): {size(config.host_bytes)} of host memory a rank, "
        f"{folder}; KV lies as {layout} and is loaded {how}; receipts follow in this log, one a request"
    )
