"""Under MultiConnector, beside vLLM's own connector that keeps KV in files; and where nobody shakes hands for ours."""

import sys

from lab import BLOCK, model, prompt, settings_of, tell
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector


def main(folder, handshake):
    path, long, settings = model(folder, "llama"), prompt(1, 200), settings_of()
    ours = settings["kv_transfer_config"]
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": f"{folder}/files"},
    }
    connectors = [{name: getattr(ours, name) for name in names}, other]
    settings["kv_transfer_config"] = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": connectors},
    )
    if handshake == "lost":  # as beside a connector that shakes hands itself and is named first
        MultiConnector.get_handshake_metadata = lambda self: None
    llm = LLM(model=path, **settings)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    connector = scheduler.connector._connectors[0]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def run(ids):
        connector.outcomes.clear()
        (reply,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        ends = [str(getattr(outcome, "end", "saved")) for outcome in connector.outcomes]
        return {"tokens": list(reply.outputs[0].token_ids), "cached": reply.num_cached_tokens, "ends": ends}

    first = run(prompt(2, 10))
    runs = [run(long), run(long)]
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    tell({"first": first, "runs": runs, "block": BLOCK, "tracked": len(connector.tracked), "free": free})


if __name__ == "__main__":
    main(*sys.argv[1:])
