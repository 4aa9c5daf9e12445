"""A forward of a model's shape over random weights, that shows what it read of every block its gates let it read."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from layercast.bench.ground import Ground, Shape

Hook = Callable[[int], object]


class Weights:
    """Random weights; the same for all lengths."""

    def __init__(self, shape: Shape) -> None:
        def of(*size: int) -> torch.Tensor:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.01

        heads = shape.heads * shape.width
        self.layers = [
            (
                of(shape.hidden, heads + 2 * shape.kv_heads * shape.width),
                of(heads, shape.hidden),
                of(shape.hidden, 2 * shape.inner),
                of(shape.inner, shape.hidden),
            )
            for _ in range(shape.layers)
        ]


class Forward:
    """A prefill of `new` tokens behind the ground's cached ones. After a layer's gate it reads a word of each block."""

    def __init__(self, weights: Weights, ground: Ground, new: int) -> None:
        shape, self.weights, self.ground, self.new = ground.shape, weights, ground, new
        tokens = ground.blocks * shape.block + new
        self.x = torch.randn(new, shape.hidden, device="cuda", dtype=torch.bfloat16)
        self.k = torch.randn(1, shape.heads, tokens, shape.width, device="cuda", dtype=torch.bfloat16)
        self.v = torch.randn_like(self.k)
        self.mask = causal_lower_right(new, tokens)
        words = shape.block_bytes // 4
        self.column = (ground.ids * 7919) % words
        self.at = torch.from_numpy(ground.ids * words + self.column).cuda()
        self.seen = torch.zeros(shape.layers, ground.blocks, dtype=torch.int32, device="cuda")
        self.flat = [pool.view(torch.int32).view(-1) for pool in ground.pools]

    def __call__(self, gate: Hook | None = None, written: Hook | None = None) -> torch.Tensor:
        """gate(layer) before a layer reads its blocks, written(layer) once its own KV would be in place."""
        shape, x, new = self.ground.shape, self.x, self.new
        heads = shape.heads * shape.width
        for layer, (qkv, o, up, down) in enumerate(self.weights.layers):
            projected = F.rms_norm(x, (shape.hidden,)) @ qkv
            q = projected[:, :heads].view(new, shape.heads, shape.width).transpose(0, 1)[None]
            if gate is not None:
                gate(layer)
            torch.take(self.flat[layer], self.at, out=self.seen[layer])
            if written is not None:
                written(layer)
            a = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=self.mask)
            x = x + a[0].transpose(0, 1).reshape(new, heads) @ o
            g = F.rms_norm(x, (shape.hidden,)) @ up
            x = x + (F.silu(g[:, : shape.inner]) * g[:, shape.inner :]) @ down
        return x

    def read_right(self) -> bool:
        """Whether it read, in every layer, what the slots hold."""
        seen, rows = self.seen.cpu().numpy(), np.arange(self.ground.blocks)
        return all(
            np.array_equal(self.ground.wanted(n)[rows, self.column], seen[n]) for n in range(self.ground.shape.layers)
        )
