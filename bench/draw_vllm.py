"""Draws what bench_vllm_gpu.py has measured: TTFT of hits beside the floor and the rivals.

python bench/draw_vllm.py bench/results/vllm_h200.json docs/vllm.png [RUN, else the last]
"""

import json
import sys
from pathlib import Path

from layercast.observe.bars import Bars, write_bars

KV_BYTES_A_TOKEN = 32 * 2 * 8 * 128 * 2
FLOOR = "floor"
FLOOR_IS = "floor: new tokens computed with the prefix in GPU memory, or the prefix at the link's limit, if longer"
WORDS = {
    "layercast": "layercast",
    "lmcache-bulk": "LMCache 0.5.3, in bulk",
    "native-256": "vLLM's own offloading,\nblocks of 256 tokens",
}
"""Engine to what it is called in the picture."""


def hits_of(facts):
    """Shape to engine to the median TTFT in ms of a hit from the host."""
    shapes = {}
    for key, entry in facts["hits"].items():
        name, shape = key.rsplit(maxsplit=1)
        shapes.setdefault(shape, {})[name] = entry["hit"]["median_ms"]
    return shapes


def floor_ms(facts, shape):
    """The longer of the engine's own time with the prefix in GPU memory, and the prefix's bytes over the link."""
    link_ms = int(shape.split("+")[0]) * KV_BYTES_A_TOKEN / facts["link"]["limit"]["h2d_gb_s"] / 1e6
    return max(link_ms, facts["hits"][f"recompute {shape}"]["in_gpu"]["median_ms"])


def panels_of(facts):
    """A panel a shape; what is computed anew is left out where it would squeeze the rest.

    So are shapes of which layercast has loaded no hit: the JSON says why.
    """
    panels = []
    for shape, engines in hits_of(facts).items():
        if not any(loaded for loaded, _ in facts["hits"][f"layercast {shape}"]["cached"]):
            continue
        hits = {WORDS[name]: value for name, value in engines.items() if name in WORDS}
        values = {FLOOR: floor_ms(facts, shape), **dict(sorted(hits.items(), key=lambda item: item[1]))}
        cold = engines.get("recompute", 0)
        cached, new = map(int, shape.split("+"))
        title = f"{cached:,} tokens from host memory, {new:,} new ones computed (all computed: {cold:,.0f} ms)"
        of = facts["hits"][f"layercast {shape}"]["hit"]["reps"]
        panels.append(Bars(title, f"ms to the first token, median of {of}", values, FLOOR))
    return panels


def main():
    source, target, *named = sys.argv[1:]
    runs = json.loads(Path(source).read_text())["runs"]
    facts = runs[named[0] if named else list(runs)[-1]]
    card = facts["link"]["limit"]["card"]
    title = f"Time to the first token of a hit: vLLM 0.26, Llama-3.1-8B's shape, one {card}"
    write_bars(panels_of(facts), Path(target), title, ["layercast"], FLOOR_IS)


if __name__ == "__main__":
    main()
