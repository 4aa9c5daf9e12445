"""What an engine's forward sees of layercast: a step with one call before and one after each layer's attention.

Does not know what moves, only that an engine calls these in order.
"""

from typing import Protocol

from layercast.flow.orders import StepReport


class Step(Protocol):
    """One forward. The number of calls an engine makes is a constant of the model, whatever the hits."""

    def wait(self, layer: int) -> None:
        """Before the layer's attention (or mixer) reads cached KV. Never raises; bounded by `layer_wait_ms`."""
        ...

    def written(self, layer: int) -> None:
        """After this step's KV of the layer lies in its blocks. Repeats change nothing. Never blocks."""
        ...

    def end(self) -> StepReport:
        """After the forward: sweep the layers without a hook, and report what ended."""
        ...
