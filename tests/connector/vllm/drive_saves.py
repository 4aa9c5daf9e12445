"""Saves that outlive their step: repeats without a pause, generated tokens, aborts, preemption, async scheduling."""

import sys

from lab import BLOCK, Engine, model, prompt, tell
from vllm import SamplingParams


def storm(engine, seed):
    """Requests that are added, stepped and aborted at every stage."""
    core = engine.llm.llm_engine
    base = prompt(seed, 200)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    for number in range(24):
        core.add_request(f"storm-{seed}-{number}", {"prompt_token_ids": [*base[: 40 + 5 * number], number]}, sampling)
        for _ in range(number % 4):
            core.step()
        if number % 3:
            core.abort_request([f"storm-{seed}-{number - 1}"])
    core.abort_request([f"storm-{seed}-{number}" for number in range(24)])
    return engine.drain()


def main(folder):
    path, facts = model(folder, "llama"), {}
    for name, settings in {
        "plain": {},
        "local": {"enable_prefix_caching": True},
    }.items():
        engine = Engine(path, **settings)
        long = prompt(1, 200)
        run = {"blocks": engine.blocks}
        run["cold"] = engine.run(long)
        run["again"] = engine.run(long)
        run["talk"] = engine.run(long, tokens=100)
        answer = run["talk"]["replies"][0]["tokens"]
        run["next_turn"] = engine.run([*long, *answer, 7])
        run["drained"] = engine.drain()
        run["storm"] = storm(engine, 3)
        if name != "local":
            reference = [engine.run(prompt(seed, 150), tokens=60)["replies"][0]["tokens"] for seed in range(20, 26)]
            run["reference"] = reference
        engine.pace(0.02)
        late = prompt(2, 200)
        run["slow"] = engine.run(late)
        run["slow_again"] = engine.run(late, keep_local=True)
        run["slow_drained"] = engine.drain()
        run["slow_storm"] = storm(engine, 4)
        run["threads"] = engine.close()
        facts[name] = run
    small = Engine(path, num_gpu_blocks_override=20, max_model_len=512)
    run = {"blocks": small.blocks}
    run["crowd"] = small.run(*(prompt(seed, 150) for seed in range(20, 26)), tokens=60)
    run["preemptions"] = small.preemptions
    run["drained"] = small.drain()
    run["threads"] = small.close()
    facts["tight"] = run
    facts["block"] = BLOCK
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
