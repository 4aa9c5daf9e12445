"""Sizes that both processes of the demo share."""

from layercast.connector.transformers.engine import EngineSettings

SETTINGS = EngineSettings(blocks=128, chunk_blocks=96)
"""One chunk holds the whole prompt, so that a picture shows one pass through the layers."""
