"""`ActiveKVConnector`, the GPU runner's driver of a connector: full graphs, pieces, idle and failed steps."""

import sys
import time
from types import SimpleNamespace

from lab import Engine, model, prompt, tell
from vllm import SamplingParams
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from layercast.connector.vllm.stats import Stats

TIMED, MANY = 2000, 32


class Runner:
    """The part of a GPU runner around its connector. Forwards compute nothing."""

    def __init__(self, engine):
        self.engine, self.scheduler, hooks = engine, engine.scheduler, engine.hooks
        register, hooks.register_kv_caches = hooks.register_kv_caches, lambda caches: None
        self.active = ActiveKVConnector(engine.core.vllm_config, {})
        hooks.register_kv_caches = register
        self.names = list(hooks._layers)

    def add(self, name, ids):
        sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
        self.scheduler.add_request(Request(name, ids, sampling, None))

    def step(self, kind):
        """One step; what the connector reports of it."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        batch = SimpleNamespace(idx_mapping=None, req_ids=names, num_tokens=output.total_num_scheduled_tokens)
        if kind == "idle":
            reported = self.active.no_forward(output).kv_connector_output or KVConnectorOutput()
        else:
            if kind == "full":
                self.active.pre_forward(output, batch, attn_metadata={})
            else:
                with set_forward_context({}, self.engine.core.vllm_config):
                    self.active.pre_forward(output, batch)
                    if kind == "failed":
                        return self.forget(output)
                    for name in self.names if kind == "pieces" else ():
                        self.engine.hooks.wait_for_layer_load(name)
                        for _ in range(2):  # as draft layers do
                            self.engine.hooks.save_kv_layer(name, None, None)
            self.active.finish_forward()
            reported = self.active.post_forward(output.finished_req_ids)
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=reported,
        )
        self.scheduler.update_from_output(output, made)
        return {
            "tokens": output.total_num_scheduled_tokens,
            "full_graphs": (reported.kv_connector_stats or Stats()).data.get("full_graph_steps_with_loads", {}),
            "invalid": sorted(reported.invalid_block_ids),
            "loads": [[o.end, o.layers] for o in self.engine.connector.outcomes if hasattr(o, "end")],
            "saves": [
                [o.saved, o.layers, o.swept_layers] for o in self.engine.connector.outcomes if hasattr(o, "saved")
            ],
        }

    def forget(self, output):
        """Nothing ever comes of a step."""
        for name, tokens in output.num_scheduled_tokens.items():
            self.scheduler.requests[name].num_in_flight_tokens -= tokens

    def request(self, name, ids, first, several=1):
        """Requests whose first step is of that kind; the others are in pieces."""
        self.engine.connector.outcomes.clear()
        for number in range(several):
            self.add(f"{name}-{number}", ids)
        steps = [self.step(first)]
        while self.scheduler.has_unfinished_requests():
            steps.append(self.step("pieces"))
        steps.append(self.step("idle"))
        while self.engine.connector.has_pending_push_work():
            steps[-1] = self.step("idle")
        return steps


def timed(runner):
    """Seconds of an idle step, and of a layer's two hooks in a step without orders."""
    output = runner.scheduler.schedule()
    start = time.perf_counter()
    for _ in range(TIMED):
        runner.engine.connector.build_connector_meta(output)
        runner.active.no_forward(output)
    idle = (time.perf_counter() - start) / TIMED
    start = time.perf_counter()
    for _ in range(TIMED):
        runner.engine.hooks.wait_for_layer_load(runner.names[0])
        runner.engine.hooks.save_kv_layer(runner.names[0], None, None)
    return {"idle_s": idle, "hooks_s": (time.perf_counter() - start) / TIMED}


def main(folder):
    engine, facts = Engine(model(folder, "llama"), max_num_seqs=MANY), {}
    runner, long = Runner(engine), prompt(1, 200)
    facts["cold"] = runner.request("cold", long, "pieces")
    facts["swept"] = runner.request("swept", prompt(2, 200), "full")
    for kind in ("pieces", "full", "no_hooks"):
        facts[kind] = runner.request(kind, long, kind)
        facts[f"{kind}_bytes"] = engine.loaded_bytes()
    runner.engine.hooks._unheard = set(runner.names)
    facts["unheard"] = runner.request("unheard", long, "no_hooks")
    facts["many"] = runner.request("many", long, "full", MANY)
    facts["failed"] = runner.request("failed", long, "failed")
    facts["drained"] = engine.drain()
    facts["times"] = timed(runner)
    facts["threads"] = engine.close()
    tell(facts)


if __name__ == "__main__":
    main(sys.argv[1])
