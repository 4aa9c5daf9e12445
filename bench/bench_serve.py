"""What the pool costs and gains in the embedded engine, with SmolLM2-135M on one compute thread.

Saving on against off, a hit of 960 of 1,024 tokens against cold, layerwise against bulk on a link paced so that the
transfer takes as long as the compute. Paired and alternated; off against off shows the spread of the machine.
"""

import argparse
import random
from pathlib import Path

import msgspec
import torch
from pairs import paired, write

from layercast.config import Config
from layercast.connector.transformers.embedded import open_engine
from layercast.connector.transformers.engine import Engine, EngineSettings
from layercast.connector.transformers.requests import Params
from layercast.demo.model import load, prepare
from layercast.flow.orders import LoadOutcome

PROMPT, PREFIX = 1024, 960
SETTINGS = EngineSettings(blocks=256, chunk_blocks=64)
DRAIN_S = 60.0


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(tokens)]


def ttft(engine: Engine, tokens: list[int], *, loads: bool, saves: bool, hit: int) -> float:
    """Seconds to the first token; the hit is checked, so that no figure stands for something else."""
    (result,) = engine.generate([tokens], Params(max_tokens=1, load=loads, save=saves))
    engine.drain(DRAIN_S)
    assert result.loaded_tokens == hit, (result.loaded_tokens, hit)
    return result.ttft_s


def saving(engine: Engine, rng: random.Random, pairs: int) -> dict[str, object]:
    def run(save: bool) -> float:
        return ttft(engine, prompt(rng, PROMPT), loads=False, saves=save, hit=0)

    run(True), run(False)
    return {
        "on_over_off": paired(lambda: run(True), lambda: run(False), pairs) | {"target": 1.05},
        "off_over_off": paired(lambda: run(False), lambda: run(False), pairs),
    }


def hit(engine: Engine, rng: random.Random, pairs: int) -> dict[str, object]:
    prefix = prompt(rng, PREFIX)
    ttft(engine, prefix + prompt(rng, 1), loads=False, saves=True, hit=0)

    def warm() -> float:
        return ttft(engine, prefix + prompt(rng, PROMPT - PREFIX), loads=True, saves=False, hit=PREFIX)

    def cold() -> float:
        return ttft(engine, prompt(rng, PROMPT), loads=False, saves=False, hit=0)

    warm(), cold()
    return {"hit_over_cold": paired(warm, cold, pairs) | {"target": 0.20}}


def paced(model: object, rng: random.Random, pairs: int) -> dict[str, object]:
    """The link carries the prefix in the time that the rest takes to compute."""
    prefix = prompt(rng, PREFIX)
    config = Config(host_bytes=512 << 20)
    with open_engine(model, config, SETTINGS) as engine:
        ttft(engine, prefix + prompt(rng, 1), loads=False, saves=True, hit=0)
        moved, compute = [], []
        for _ in range(7):
            (result,) = engine.generate([prefix + prompt(rng, PROMPT - PREFIX)], Params(max_tokens=1, save=False))
            (outcome,) = (r for r in result.receipts if isinstance(r, LoadOutcome))
            moved.append(outcome.nbytes)
            compute.append(result.ttft_s - outcome.exposed_s)
    compute_s = sorted(compute)[len(compute) // 2]
    gbps = moved[0] * 8e-9 / compute_s
    engines = {}
    with (
        open_engine(model, config, SETTINGS, link_gbps=gbps) as engines["layerwise"],
        open_engine(model, msgspec.structs.replace(config, use_layerwise=False), SETTINGS, link_gbps=gbps) as engines[
            "bulk"
        ],
    ):
        for engine in engines.values():
            ttft(engine, prefix + prompt(rng, 1), loads=False, saves=True, hit=0)

        def run(name: str) -> float:
            tokens = prefix + prompt(rng, PROMPT - PREFIX)
            return ttft(engines[name], tokens, loads=True, saves=False, hit=PREFIX)

        run("layerwise"), run("bulk")
        found = paired(lambda: run("layerwise"), lambda: run("bulk"), pairs)
        spread = paired(lambda: run("bulk"), lambda: run("bulk"), pairs)
    return {
        "link": "paced",
        "link_gbps": gbps,
        "compute_s": compute_s,
        "bytes": moved[0],
        "layerwise_over_bulk": found | {"target": 0.65},
        "bulk_over_bulk": spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "layercast")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, _ = load(prepare(args.cache), getattr(torch, args.dtype))
    rng = random.Random(7)
    results: dict[str, object] = {"model": "SmolLM2-135M", "dtype": args.dtype, "compute_threads": 1}
    with open_engine(model, Config(host_bytes=512 << 20), SETTINGS) as engine:
        results["hit"] = hit(engine, rng, args.pairs)
        write(args.json, results)
        results["saving"] = saving(engine, rng, args.pairs)
        write(args.json, results)
    results["paced"] = paced(model, rng, args.pairs)
    write(args.json, results)


if __name__ == "__main__":
    main()
