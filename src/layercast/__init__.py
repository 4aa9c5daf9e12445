"""layercast: a language model's KV cache, moved layer by layer."""

__version__ = "0.1.0"
