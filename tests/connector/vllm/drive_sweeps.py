"""Full graphs that load and save in one step, for one request and for 32: what vLLM is told of them as metrics."""

import sys

from drive_active import MANY, Runner
from lab import BLOCK, Engine, model, prompt, tell

from layercast.connector.vllm.stats import Stats

KNOWN, NEW = 2 * BLOCK, BLOCK + 8


def counted(scheduler):
    """What goes from the scheduler to whoever serves metrics, from now on."""
    total, make = Stats(), scheduler.make_stats

    def make_stats(spec_decoding_stats=None, kv_connector_stats=None, *rest, **more):
        if kv_connector_stats is not None:
            total.aggregate(kv_connector_stats)
        return make(spec_decoding_stats, kv_connector_stats, *rest, **more)

    scheduler.make_stats = make_stats
    return total


def main(folder):
    """Each prompt has two stored blocks, and fills one that is not stored yet."""
    engine, facts = Engine(model(folder, "llama"), max_num_seqs=MANY, max_num_batched_tokens=2048), {}
    runner, total, known = Runner(engine), counted(engine.scheduler), prompt(1, KNOWN)
    runner.request("known", [*known, 9], "pieces")
    for size in (1, MANY):
        total.reset()
        engine.connector.outcomes.clear()
        for number in range(size):
            runner.add(f"{size}-{number}", [*known, *prompt(1000 * size + number, NEW)])
        steps = [runner.step("full")]
        while engine.scheduler.has_unfinished_requests():
            steps.append(runner.step("full"))
        steps.append(runner.step("idle"))
        while engine.connector.has_pending_push_work():
            steps[-1] = runner.step("idle")
        facts[size] = {"tokens": steps[0]["tokens"], "loads": steps[-1]["loads"], "saves": steps[-1]["saves"]}
        facts[size]["counters"] = {name: dict(labels) for name, labels in total.data.items()}
        facts[size]["invalid"] = [step["invalid"] for step in steps if step["invalid"]]
    facts |= {"layers": len(runner.names), "new": NEW, "drained": engine.drain()}
    facts["threads"] = engine.close()
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
