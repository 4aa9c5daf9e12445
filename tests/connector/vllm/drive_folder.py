"""An engine that shares KV through a folder with others, each in a process of its own.

Usage: python drive_folder.py FOLDER ROLE KV [SETTING=JSON ...]      ROLE: plain, or a kv_role; KV: the shared folder.
Plain runs without a connector, then as kv_producer. Settings: of the pool; also model, local, and dies_after, a number
of objects written.
"""

import json
import os
import signal
import sys
import time

from lab import BLOCK, Engine, cleanup_dist_env_and_memory, model, prompt, settings_of, tell
from vllm import LLM, SamplingParams

PROMPTS = [prompt(seed, tokens) for seed, tokens in ((1, 200), (2, 31), (3, 32), (4, 33), (5, 500))]
TOLD = {"extra_args": {"kv_transfer_params": {"layercast": {}}}}


def without_connector(path, **settings):
    """Tokens of the answers of an engine that has no connector."""
    llm = LLM(model=path, **{**settings_of(), "kv_transfer_config": None, **settings})
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    done = [llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0] for ids in PROMPTS]
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    return [list(reply.outputs[0].token_ids) for reply in done]


def die_after(objects):
    """Kill this process in the middle of writing, with one more object unfinished."""
    rename, done = os.rename, []

    def dying(*names):
        if len(done) == objects:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*names)
        done.append(names)

    os.rename = dying


def counted(engine):
    """What vLLM's own metrics are told, all steps together."""
    stats, take = {}, engine.connector.get_kv_connector_stats

    def noted():
        found = take()
        for name, labels in (found.data if found else {}).items():
            for label, number in labels.items():
                stats[f"{name} {label}"] = stats.get(f"{name} {label}", 0) + number
        return found

    engine.connector.get_kv_connector_stats = noted
    return stats


def main(folder, role, kv, *pairs):
    settings = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in pairs)}
    path, local = model(folder, settings.pop("model", "llama")), settings.pop("local", False)
    facts = {"block": BLOCK, "seed": os.environ.get("PYTHONHASHSEED"), "prompts": [len(ids) for ids in PROMPTS]}
    if role == "plain":
        facts["plain"], role = without_connector(path), "kv_producer"
    dies_after = settings.pop("dies_after", None)
    if dies_after is not None:
        die_after(dies_after)
    descriptors = len(os.listdir("/proc/self/fd"))
    told = {"enable_prefix_caching": local, "disable_log_stats": False}
    engine = Engine(path, pool={"disk_path": kv, **settings}, role=role, **told)
    stats, sources, source_of = counted(engine), [], engine.connector.get_external_cache_hit_sources

    def sourced(request, tokens):
        sources.append({source.value: count for source, count in source_of(request, tokens).items()})
        return source_of(request, tokens)

    engine.connector.get_external_cache_hit_sources = sourced
    start_s = time.monotonic()
    facts["runs"] = []
    for ids in PROMPTS:
        facts["runs"].append(engine.run(ids, params=TOLD))
        engine.drain()  # a save whose blocks are wanted before it has ended is dropped
    facts["seconds"] = time.monotonic() - start_s
    facts["again"] = engine.run(PROMPTS[0], params=TOLD)
    facts["drained"] = engine.drain()
    engine.connector.get_kv_connector_stats()
    facts["blocks"], facts["stats"], facts["sources"] = engine.blocks, stats, sources
    facts["identity"] = engine.side._names._roots[0].hex()
    facts["threads"] = engine.close()
    facts["descriptors"] = len(os.listdir("/proc/self/fd")) - descriptors
    tell(facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
