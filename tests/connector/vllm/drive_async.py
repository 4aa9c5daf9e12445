"""The real AsyncScheduler over made-up forwards (vLLM has no async scheduling on CPUs): what is ordered, and when."""

import random
import sys
from collections import Counter

from lab import BLOCK, Engine, model, prompt, tell
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from layercast.connector.vllm import saves

TOKENS = 900


class Pipeline:
    """An AsyncScheduler with one step in flight. Forwards are made up: every request gets a random token."""

    def __init__(self, engine):
        config, old = engine.core.vllm_config, engine.scheduler
        config.scheduler_config.async_scheduling = True
        self.scheduler = AsyncScheduler(
            config, old.kv_cache_config, old.structured_output_manager, old.block_size, old.hash_block_size
        )
        self.connector, self.draw = self.scheduler.connector, random.Random(1)
        self.connector.side = engine.side
        self.flying, self.steps = [], 0

    def add(self, name, ids, tokens):
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        request = Request(name, ids, sampling, None)
        self.scheduler.add_request(request)
        return request

    def schedule(self):
        self.steps += 1
        self.flying.append(self.scheduler.schedule())
        return self.flying[-1]

    def finish(self, **reports):
        """The oldest step in flight comes back."""
        step = self.flying.pop(0)
        names = list(step.num_scheduled_tokens)
        alive = {name: self.scheduler.requests[name] for name in names if name in self.scheduler.requests}
        done = [name for name, request in alive.items() if not request.is_prefill_chunk]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[self.draw.randrange(5, 500)] if name in done else [] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(**reports),
        )
        self.scheduler.update_from_output(step, output)


def main(folder):
    saves.LUMP = 8
    engine, facts = Engine(model(folder, "llama")), {}
    long = prompt(1, 200)
    engine.run(long)
    line, ordered, in_steps = Pipeline(engine), [], Counter()
    save_order = engine.side.save_order

    def noted(name, tokens, before, after, *rest):
        order = save_order(name, tokens, before, after, *rest)
        ordered.append((name, list(tokens), after, order is not None))
        in_steps[line.steps, len(tokens) > 60 + BLOCK] += order is not None
        return order

    engine.side.save_order = noted
    warm = line.add("warm", long, 4)
    facts["answer"] = line.connector.get_num_new_matched_tokens(warm, 0)
    facts["hit"] = 6 * BLOCK
    line.scheduler.finish_requests("warm", RequestStatus.FINISHED_ABORTED)
    talk = line.add("talk", prompt(7, 90), TOKENS)
    line.schedule()
    while line.scheduler.has_unfinished_requests():
        line.schedule()
        line.finish()
    line.schedule()
    final = list(talk.all_token_ids)
    facts["orders"] = len([name for name, *_, made in ordered if name == "talk" and made])
    facts["tokens_known"] = all(tokens[:after] == final[:after] for name, tokens, after, _ in ordered if name == "talk")
    facts["saved_to"] = max(after for name, _, after, _ in ordered if name == "talk") // BLOCK * BLOCK
    facts["computed"] = len(final) - 1
    facts["block"] = BLOCK
    in_steps.clear()
    for n in range(8):
        line.add(f"choir-{n}", prompt(n + 20, 60), 16 * BLOCK)
    before = line.steps
    line.flying.clear()
    line.schedule()
    while line.scheduler.has_unfinished_requests():
        line.schedule()
        line.finish()
    generated = [count for (step, late), count in in_steps.items() if late and step < before + 16 * BLOCK]
    facts["choir"] = [sum(generated), max(generated)]
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
