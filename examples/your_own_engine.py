"""The pool as a library: an engine of a few lines, no transformer and no torch, with caches in numpy arrays."""

import numpy as np

from layercast.config import Config
from layercast.control.node import open_pool
from layercast.control.pool import Pool
from layercast.flow.orders import StepOrders
from layercast.spec.groups import GroupKind, GroupSpec, layout_of
from layercast.spec.identities import identities_of
from layercast.spec.planes import PlaneKind, plane_of_tensor

LAYERS, BLOCKS, BLOCK, WIDTH = 4, 64, 8, 16
caches = [np.zeros((BLOCKS, BLOCK, WIDTH), np.float32) for _ in range(LAYERS)]


def layout_of_caches():
    """What the pool must know: where each layer's cache lies, and which axis of it is what."""
    shape, strides, axes = (BLOCKS, BLOCK, WIDTH), (BLOCK * WIDTH, WIDTH, 1), ("block", "token", "content")
    planes = [
        plane_of_tensor(f"layer {at}", at, PlaneKind.KV, "float32", cache.ctypes.data, shape, strides, axes)
        for at, cache in enumerate(caches)
    ]
    return layout_of([GroupSpec("all", GroupKind.FULL, BLOCK, tuple(range(LAYERS)))], planes)


def answer(pool: Pool, number: int, tokens: list[int], table: list[int]) -> tuple[int, float]:
    """(Tokens loaded, the model's answer). In every layer a row is mixed with the mean of all rows up to it."""
    request, match = f"request {number}", pool.match(tokens)
    load = pool.load_order(request, match, [table])
    done = match.tokens if load else 0
    save = pool.save_order(request, tokens, done, len(tokens), [table])
    step = pool.begin(StepOrders(number, (load,) if load else (), (save,) if save else ()))
    rows = np.sin(np.outer(tokens[done:], np.arange(1, WIDTH + 1))).astype(np.float32)
    for layer, cache in enumerate(caches):
        step.wait(layer)  # this layer's loaded rows are there now; the next layer's are on their way
        for at, row in enumerate(rows, done):
            cache[table[at // BLOCK], at % BLOCK] = row
        step.written(layer)  # this layer's new rows leave while the next layer computes
        seen = cache[table].reshape(-1, WIDTH)[: len(tokens)]
        means = np.cumsum(seen, axis=0) / np.arange(1, len(tokens) + 1)[:, None]
        rows = np.tanh(rows + means[done:]).astype(np.float32)
    failed = pool.settle(step.end()).failed  # loads that were late or damaged: run these again without one
    pool.reports(number, timeout_s=10)
    pool.finish(request)
    return done, np.nan if failed else float(rows[-1].sum())


def main() -> None:
    layout, prompt = layout_of_caches(), [token % 50 for token in range(100)]
    with open_pool(layout, identities_of(layout, model="means"), Config(host_bytes=1 << 20), keep=caches) as pool:
        for number, first in enumerate((0, 20, 40)):
            loaded, value = answer(pool, number, prompt, list(range(first, first + 13)))
            print(f"request {number}: {loaded} of {len(prompt)} tokens loaded, answer {value:.6f}")


if __name__ == "__main__":
    main()
