"""Models with several cache groups: windows, recurrent states, latent KV, experts. Usage: drive_groups.py FOLDER."""

import sys

from lab import Engine, model, prompt, tell, without_checkpoints

from layercast.spec.keys import block_keys

RUNS = {
    "qwen3_moe": {},
    "gemma3": {},
    "gemma3_local": {"enable_prefix_caching": True},
    "gpt_oss": {},
    "granite4h": {"enable_prefix_caching": True, "mamba_cache_mode": "align", "block_size": None},
    "deepseek_v3": {"block_size": None},
}


def named(engine, ids):
    """(By group, whether vLLM's digests tell its blocks; whether what they find has the names that hashing gives.)"""
    asked, match = [], engine.side.match
    engine.side.match = lambda tokens, *rest: asked.append(tokens) or match(tokens, *rest)
    engine.run(ids, tokens=1)
    del engine.side.match
    naming, (tokens, *_) = engine.side._names, asked
    chains = naming.of(None, tokens, len(tokens))
    hashed = [block_keys(identity, list(tokens)) for identity in naming._identities]
    return [bool(chain._digests) for chain in chains], [list(chain) for chain in chains] == hashed


def main(folder):
    without_checkpoints()
    facts = {}
    for name in sys.argv[2:] or RUNS:
        settings = RUNS[name]
        path = model(folder, name.removesuffix("_local"))
        engine = Engine(path, max_num_batched_tokens=512, pool={"host_bytes": 64 << 20}, **settings)
        size = max(spec.block_size for spec in engine.side.specs)
        long = prompt(1, 4 * size + 10)
        run = {"blocks": engine.blocks, "size": size, "groups": [str(spec.kind) for spec in engine.side.specs]}
        run["cold"] = engine.run(long)
        run["warm"] = engine.run(long)
        run["bytes"] = engine.loaded_bytes()
        run["layers"] = len(engine.worker.ways.layers)
        run["zeroing"] = engine.scheduler.needs_kv_cache_zeroing
        run["shorter"] = engine.run(long[: 2 * size + 5])
        run["edges"] = [engine.run(long[:n])["replies"][0] for n in (1, size - 1, size, size + 1)]
        engine.connector.get_num_new_matched_tokens = lambda request, local: (0, False)
        run["plain_edges"] = [engine.run(long[:n])["replies"][0] for n in (1, size - 1, size, size + 1)]
        del engine.connector.get_num_new_matched_tokens
        run["drained"] = engine.drain()
        for group, spec in enumerate(engine.side.specs):
            engine.flip(engine.slot(long, 3, group), spec.layers[-1], group)
            for name_of in ("flipped", "mended"):
                answered = engine.run(long)
                engine.drain()  # what is saved behind the answer counts too
                run[f"{name_of}_{group}"] = answered | {key: engine.facts()[key] for key in ("saves", "stored")}
        for group in range(len(engine.side.specs)):
            engine.forge(engine.slot(long, 3, group), group)
        run["forged"] = engine.run(long)
        run["drained"] = engine.drain()
        run["digested"], run["named"] = named(engine, long)
        run["threads"] = engine.close()
        facts[name] = run
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
