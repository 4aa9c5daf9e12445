"""Two tensor-parallel ranks, each a process with a slab of its own, under one scheduler in this process.

Usage: FOLDER [KV]      KV: a folder under the slabs.
"""

import os
import sys

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"

from lab import BLOCK, model, prompt, settings_of, tell
from vllm import LLM, SamplingParams


def main(folder, kv=""):
    path, long = model(folder, "llama"), prompt(1, 200)
    llm = LLM(model=path, **{**settings_of({"disk_path": kv}), "tensor_parallel_size": 2})
    core = llm.llm_engine.engine_core.engine_core
    connector = core.scheduler.connector
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)

    def run(ids):
        connector.outcomes.clear()
        (reply,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        return {
            "tokens": list(reply.outputs[0].token_ids),
            "cached": reply.num_cached_tokens,
            "ends": [str(getattr(outcome, "end", "saved")) for outcome in connector.outcomes],
            "bytes": [outcome.nbytes for outcome in connector.outcomes],
        }

    facts = {"ranks": connector.side.directory.ranks, "block": BLOCK, "cold": run(long), "warm": run(long)}
    facts["turn"] = run([*long, *facts["cold"]["tokens"], 9])
    steps = 0
    while core.scheduler.has_requests() and steps < 10_000:
        core.step_fn()
        steps += 1
    facts["idle"] = connector.side.idle and not connector.tracked
    llm.llm_engine.engine_core.shutdown()
    tell(facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
