"""The demo's scenario: one chat prompt behind a long shared prefix, answered cold, bulk, layerwise and pushed.

Knows the engine adapter and the model, nothing of terminals, files or pictures.
"""

from pathlib import Path

import msgspec

from layercast.config import Config
from layercast.demo.report import DemoResult
from layercast.errors import Refused


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may choose. link_gbps: pace the link, None = as fast as it goes. dtype: auto, bfloat16, float32."""

    config: Config
    cache: Path
    link_gbps: float | None = None
    dtype: str = "auto"


def run(options: Options) -> DemoResult:
    """Answer the prompt in every mode."""
    raise Refused("the demo's scenario is not there yet; layercast doctor works")
