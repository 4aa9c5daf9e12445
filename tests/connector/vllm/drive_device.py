"""Real vLLM whose pool takes its memory for a device's that carries its copies out later: the mover, gates and loops
of a GPU under a real scheduler. The forward's own thread is the device's stream of compute."""

import os
import sys
from pathlib import Path

from lab import LLM, Engine, cleanup_dist_env_and_memory, model, prompt, settings_of, tell

sys.path.append(str(Path(__file__).parents[2] / "move"))

from async_device import CALLER, AsyncDevice
from drive_saves import storm
from vllm import SamplingParams

from layercast.move.cuda import CudaMover
from layercast.move.cuda_issue import best_issue

CACHE = {"num_gpu_blocks_override": 48, "max_model_len": 512}
"""Less than the prompts' blocks: some are preempted."""
PROMPTS = [prompt(seed, 200) for seed in range(30, 38)]
TURNS = [[*ids, *prompt(100 + at, 20 + 7 * at)] for at, ids in enumerate(PROMPTS)]
TOKENS = 40


def bells():
    """How many event files this process has."""
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("eventfd" in os.readlink(file) for file in files if os.path.lexists(file))


def without_pool(path):
    """What the engine answers that computes all by itself."""
    settings = {name: value for name, value in settings_of().items() if name != "kv_transfer_config"}
    llm = LLM(model=path, **{**settings, "max_model_len": 512})
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": ids} for ids in (*PROMPTS, *TURNS)]
    answers = [list(reply.outputs[0].token_ids) for reply in llm.generate(asked, sampling, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return {"prompts": answers[: len(PROMPTS)], "turns": answers[len(PROMPTS) :]}


def main(folder):
    path = model(folder, "llama")
    facts = {"alone": without_pool(path), "bells": bells()}
    device = AsyncDevice(gb_s=0.1)
    with device.in_place_of_cuda(CALLER, best_issue):
        engine = Engine(path, **CACHE)
        assert isinstance(engine.worker.mover, CudaMover)
        facts["blocks"] = engine.blocks
        facts["cold"] = engine.run(*PROMPTS, tokens=TOKENS)
        facts["hits"] = engine.run(*PROMPTS, tokens=TOKENS)
        facts["turns"] = engine.run(*TURNS, tokens=TOKENS)
        facts["most_loads_a_step"] = max(len(orders.loads) for orders in engine.orders)
        facts["background"] = sum(len(orders.background) for orders in engine.orders)
        facts["storm"] = storm(engine, 5)
        facts["again"] = engine.run(*PROMPTS, tokens=TOKENS)
        facts["preemptions"] = engine.preemptions
        facts["drained"] = engine.drain()
        facts["threads"] = engine.close()
    device.close()
    facts["bells_left"] = bells()
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
