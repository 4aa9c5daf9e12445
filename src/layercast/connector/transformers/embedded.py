"""An engine with its pool, opened and closed together in one process.

Does not know what the pool does with the memory it is shown.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256

import torch
from transformers import PreTrainedModel

from layercast.config import Config
from layercast.connector.transformers.engine import Engine, EngineSettings
from layercast.connector.transformers.pool import KVPool
from layercast.control.node import open_pool
from layercast.flow.worker import NO_PEERS, Peers
from layercast.observe.timeline import OFF, Timeline
from layercast.spec.groups import Layout
from layercast.spec.identities import identities_of

SAMPLE = 64


@contextmanager
def open_engine(
    model: PreTrainedModel,
    config: Config | None = None,
    settings: EngineSettings | None = None,
    *,
    link_gbps: float | None = None,
    peers: Peers = NO_PEERS,
    timeline: Timeline = OFF,
) -> Iterator[Engine]:
    """An engine over `model` with a pool as `config` says; link_gbps paces its copies (see `open_pool`)."""
    with ExitStack() as stack:

        def pool(layout: Layout) -> KVPool:
            identities = identities_of(layout, model=type(model).__name__, weights_version=weights_digest(model))
            opened = open_pool(
                layout, identities, config or Config(), link_gbps=link_gbps, peers=peers, timeline=timeline
            )
            return stack.enter_context(opened)

        # The engine outlives its pool, so nothing moves into memory that is gone.
        yield Engine(model, settings, pool)


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of the config and of a sample of every weight: other weights, other keys, without reading them all."""
    digest = sha256(model.config.to_json_string(use_diff=False).encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLE)].contiguous().cpu().view(torch.uint8)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
