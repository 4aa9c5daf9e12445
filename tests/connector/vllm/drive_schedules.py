"""Random schedules of arrivals, aborts, preemptions and lost bytes on a small cache.

Usage: FOLDER MODEL SCHEDULES [KV]      KV: a folder under the slab.
"""

import random
import sys
from pathlib import Path

from lab import Engine, model, prompt, tell
from vllm import SamplingParams

PROMPTS, TOKENS, LIMIT = 6, 24, 3000


def ids_of(number):
    """Prompts that share prefixes of three lengths."""
    return [*prompt(number % 2, 70 + 40 * (number % 3)), *prompt(100 + number, 20)]


def schedule(engine, number, references):
    """One schedule; requests whose tokens differ, and what is left."""
    draw, llm = random.Random(number), engine.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    to_come = [(f"{number}-{i}", draw.randrange(PROMPTS)) for i in range(draw.randrange(3, 8))]
    asked, aborted, done, steps = dict(to_come), set(), {}, 0
    while (to_come or llm.has_unfinished_requests()) and steps < LIMIT:
        steps += 1
        if to_come and draw.random() < 0.5:
            name, which = to_come.pop()
            llm.add_request(name, {"prompt_token_ids": ids_of(which)}, sampling)
        if draw.random() < 0.03:
            alive = [name for name in asked if name not in done]
            victim = draw.choice(alive) if alive else None
            if victim is not None and all(victim != name for name, _ in to_come):
                llm.abort_request([victim])
                aborted.add(victim)
        if draw.random() < 0.05:
            group = draw.randrange(len(engine.side.specs))
            stored = list(engine.side.directory._shelves[group].stored.values())
            if stored:
                engine.flip(draw.choice(stored), draw.choice(engine.side.specs[group].layers), group)
        if draw.random() < 0.02 and not engine.connector.tracked:
            engine.llm.reset_prefix_cache()
        for reply in llm.step():
            if reply.finished:
                done[reply.request_id] = list(reply.outputs[0].token_ids)
    wrong = [n for n, out in done.items() if n not in aborted and out != references[asked[n]]]
    missing = [name for name in asked if name not in done and name not in aborted]
    return {"number": number, "wrong": wrong, "missing": missing, **engine.drain()}


def main(folder, name, count, kv=""):
    engine = Engine(
        model(folder, name),
        num_gpu_blocks_override=18 if name == "llama" else 60,
        max_model_len=320,
        enable_prefix_caching=True,
        pool={"host_bytes": 5 << 17, "layer_wait_ms": 2000, "disk_path": kv},
    )
    references = [engine.run(ids_of(n), tokens=TOKENS)["replies"][0]["tokens"] for n in range(PROMPTS)]
    runs = [schedule(engine, number, references) for number in range(int(count))]
    stats = engine.side.directory.stats
    facts = {"bad": [run for run in runs if run["wrong"] or run["missing"] or not run["idle"] or run["held"]]}
    facts |= {"runs": len(runs), "preemptions": engine.preemptions, "blocks": engine.blocks}
    facts |= {"free": sorted({run["free_blocks"] for run in runs}), "requests": sorted({r["requests"] for r in runs})}
    facts |= {"written": sum(path.is_file() for path in Path(kv).rglob("*")) if kv else 0}
    facts |= {"hits": stats.hits, "evictions": stats.evictions, "forgotten": stats.forgotten}
    facts["threads"] = engine.close()
    tell(facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
