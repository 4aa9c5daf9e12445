"""The demo in vLLM: one prompt cold, then from the pool once vLLM's own prefix cache is empty, in bulk and layerwise.

The engine runs in this process, on the CPU and one compute thread: with more, vLLM's threads and those that move KV
spin on the same cores. Import it before torch: vLLM and OpenMP read the environment when they are loaded.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TORCH_CPP_LOG_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import msgspec
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from layercast.connector.vllm.connector import LayercastConnector
from layercast.demo.model import prompt_ids, ready
from layercast.demo.prompt import QUESTION
from layercast.demo.report import DemoResult, Taken, in_the_middle, mode_of, until_first_token
from layercast.demo.scenario import MOST_TOKENS, ROUNDS, Options, pool_of
from layercast.errors import Refused
from layercast.observe.receipts import Receipt, receipts_in
from layercast.observe.timeline import Timeline

HITS = ("bulk", "layerwise")
CACHE_BYTES = 128 << 20
"""vLLM's own KV memory: plenty for one prompt."""
LONGEST = 2048
MOST_LINES = 1 << 16
"""Of the connector's log that are kept for an answer's receipt: the one that `layercast why` would read."""


class TimedConnector(LayercastConnector):
    """The connector with a recorder, and with a link that `run` sets. vLLM makes it, by its name."""

    timeline = Timeline()


def run(options: Options, say: Callable[[str], None]) -> DemoResult:
    """Answer the prompt cold and from the pool, ROUNDS times each. Raises Missing, NoDiskSpace, Refused."""
    say(f"loading SmolLM2-135M from {options.cache} into vLLM (the first time takes a minute)")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of vLLM about torch, nothing that a user can mend
    folder, dtype = ready(options.cache, options.dtype, options.config.host_bytes)
    TimedConnector.link_gbps = options.link_gbps
    taken: dict[str, list[Taken]] = {name: [] for name in ("cold", *HITS)}
    for name in HITS:
        with _engine(str(folder), dtype, options, name) as engine:
            prompt = prompt_ids(engine.llm.get_tokenizer(), QUESTION)
            engine.answer("warm-up", prompt[:64])
            for number in range(ROUNDS):
                say(f"round {number + 1} of {ROUNDS}, cold and {name}: {len(prompt):,} prompt tokens")
                cold = engine.answer(f"cold-{number}", prompt, empty_pool=True)
                if name == HITS[-1]:  # an engine that loads in bulk saves in bulk too
                    taken["cold"].append(cold)
                taken[name].append(engine.answer(f"{name}-{number}", prompt, hit=True))
    return in_the_middle(taken, options.link_gbps, f"SmolLM2-135M in vLLM, {dtype}, 1 compute thread")


class _Engine:
    """One vLLM engine and what its connector says of each request."""

    def __init__(self, llm: LLM, log: BufferingHandler) -> None:
        self.llm = llm
        self._log = log

    def answer(self, name: str, prompt: list[int], *, empty_pool: bool = False, hit: bool = False) -> Taken:
        """One answer's figures, vLLM's own prefix cache being empty, and its spans up to the first token.

        hit: it must load something. Raises Refused, with the receipt's reason, if it did not.
        """
        if not self.llm.reset_prefix_cache(reset_connector=empty_pool):
            raise Refused("vLLM would not empty its prefix cache: some block of an earlier answer is still in use")
        timeline = TimedConnector.timeline
        timeline.clear()
        started_s = time.monotonic()
        ttft_s, text = self._generate(name, prompt)
        receipt = self._receipt(name)
        if hit and not receipt.loaded_tokens:
            raise Refused(f"{name}: nothing was loaded. {receipt.sentence}")
        return mode_of(receipt, ttft_s, text), until_first_token(timeline.spans(), started_s, ttft_s)

    def _generate(self, name: str, prompt: list[int]) -> tuple[float, str]:
        """Seconds to the first token, and the whole answer."""
        engine, started_s, ttft_s, text = self.llm.llm_engine, time.monotonic(), 0.0, ""
        engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=MOST_TOKENS))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ttft_s = ttft_s or time.monotonic() - started_s
                text = output.outputs[0].text
        return ttft_s, text

    def _receipt(self, name: str) -> Receipt:
        found = receipts_in((record.getMessage() for record in self._log.buffer), name)
        self._log.flush()
        if not found:
            raise Refused(f"{name}: the connector left no receipt; report this")
        return found[-1]


@contextmanager
def _engine(folder: str, dtype: str, options: Options, name: str) -> Iterator[_Engine]:
    """An engine whose pool loads in the way of that name, and which is gone afterwards."""
    transfer = KVTransferConfig(
        kv_connector=TimedConnector.__name__,
        kv_connector_module_path=TimedConnector.__module__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=msgspec.to_builtins(pool_of(options, name)),
    )
    kept, log = BufferingHandler(MOST_LINES), logging.getLogger("layercast")
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    llm = LLM(
        model=folder,
        dtype=dtype,
        kv_transfer_config=transfer,
        enforce_eager=True,
        max_model_len=LONGEST,
        max_num_batched_tokens=LONGEST,
        max_num_seqs=4,
        kv_cache_memory_bytes=CACHE_BYTES,
        use_tqdm_on_load=False,
    )
    try:
        yield _Engine(llm, kept)
    finally:
        log.removeHandler(kept)
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
