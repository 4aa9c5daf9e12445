"""An engine with its pool, opened and closed together in one process.

Does not know what the pool does with the memory it is shown.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256

import torch
from transformers import PreTrainedModel

from layercast.config import Config
from layercast.connector.transformers.engine import Engine, EngineSettings
from layercast.control.memory import CLOSE_S
from layercast.control.node import open_pool
from layercast.control.pool import Pool
from layercast.control.push_node import PushNode
from layercast.control.pushes import Engine as PushFacts
from layercast.errors import Refused
from layercast.observe.timeline import OFF, Timeline
from layercast.spec.groups import Layout
from layercast.spec.identities import identities_of
from layercast.transport.base import Transport

SAMPLE = 64


@contextmanager
def open_engine(
    model: PreTrainedModel,
    config: Config | None = None,
    settings: EngineSettings | None = None,
    *,
    link_gbps: float | None = None,
    transport: Transport | None = None,
    timeline: Timeline = OFF,
) -> Iterator[Engine]:
    """An engine over `model` with a pool as `config` says, both ended together.

    link_gbps: pace the pool's copies (see `open_pool`). transport: its own from now on, for pushes. Raises Refused for
    what is no model, and as `Engine`.
    """
    if not isinstance(model, PreTrainedModel):
        raise Refused(
            f"open_engine takes a loaded model, not {model!r:.60}: AutoModelForCausalLM.from_pretrained(...).eval()"
        )
    config = config or Config()
    named = partial(identities_of, model=type(model).__name__, weights_version=weights_digest(model))
    with ExitStack() as stack:

        def open_for(layout: Layout) -> Pool:
            return stack.enter_context(open_pool(layout, named(layout), config, link_gbps=link_gbps, timeline=timeline))

        engine = Engine(model, open_for, settings)  # outlives its pool, so nothing moves into memory that is gone
        if transport is not None:
            layout, worker = engine.memory.layout, engine.pool.worker
            facts = PushFacts(layout, named(layout), worker.mover, config, time.monotonic, timeline=timeline)
            node = engine.pushes.node = PushNode(facts, transport)
            worker.peers = node.peers
            stack.callback(node.close, CLOSE_S)
        yield engine


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of the config and of a sample of every weight: other weights, other keys, without reading them all."""
    digest = sha256(model.config.to_json_string(use_diff=False).encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLE)].contiguous().cpu().view(torch.uint8)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
