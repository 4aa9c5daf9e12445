"""The next token from logits. Every request draws from its own generator, so batching never changes its answer."""

import torch

from layercast.connector.transformers.requests import Params


def next_token(logits: torch.Tensor, params: Params, generator: torch.Generator) -> int:
    """One token id from `logits` `[vocabulary]`: the largest at temperature 0, else drawn from the top-p nucleus."""
    if params.temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float().cpu() / params.temperature, dim=-1)
    ordered, ids = probabilities.sort(descending=True, stable=True)
    # A token stays if the mass before it is below top_p, so the first one always does.
    ordered[ordered.cumsum(0) - ordered >= params.top_p] = 0.0
    return int(ids[torch.multinomial(ordered, 1, generator=generator)])
