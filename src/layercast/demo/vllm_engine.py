"""One vLLM engine of the demo, in a process of its own: it answers the prompt, vLLM's own prefix cache being empty.

It runs on the CPU, in the environment that `demo/vllm.py` has set. Does not know the other engines.
"""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from multiprocessing.connection import Connection

import msgspec
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from layercast.config import Config
from layercast.connector.vllm.connector import LayercastConnector
from layercast.demo.model import prompt_ids
from layercast.demo.process import jobs, say
from layercast.demo.prompt import QUESTION
from layercast.demo.report import Taken, mode_of, until_first_token
from layercast.demo.scenario import MOST_TOKENS
from layercast.demo.vllm import Answer, Job, Ready, Setup
from layercast.errors import Refused
from layercast.observe.receipts import Receipt, receipts_in
from layercast.observe.timeline import Timeline

CACHE_BYTES = 128 << 20
"""vLLM's own KV memory: plenty for one prompt."""
LONGEST = 2048
MOST_LINES = 1 << 16
"""Of the connector's log that are kept for an answer's receipt: the one that `layercast why` would read."""


class TimedConnector(LayercastConnector):
    """The connector with a recorder, and with a link that `serve` sets. vLLM makes it, by its name."""

    timeline = Timeline()


def serve(connection: Connection, encoded: bytes) -> None:
    """The process: answers until the parent goes away."""
    setup = msgspec.msgpack.decode(encoded, type=Setup)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of vLLM about torch, nothing that a user can mend
    TimedConnector.link_gbps = setup.link_gbps
    with _engine(setup.folder, setup.dtype, setup.config) as engine:
        prompt = prompt_ids(engine.llm.get_tokenizer(), QUESTION)
        engine.answer(Job("warm-up"), prompt[:64])
        say(connection, Ready(len(prompt)))
        for job in jobs(connection, Job):
            say(connection, Answer(engine.answer(job, prompt)))


class _Engine:
    """One vLLM engine and what its connector says of each request."""

    def __init__(self, llm: LLM, log: BufferingHandler) -> None:
        self.llm = llm
        self._log = log

    def answer(self, job: Job, prompt: list[int]) -> Taken:
        """One answer's figures, vLLM's own prefix cache being empty, and its spans up to the first token.

        Raises Refused, with the receipt's reason, if it loaded nothing and should.
        """
        if not self.llm.reset_prefix_cache(reset_connector=job.empty_pool):
            raise Refused("vLLM would not empty its prefix cache: some block of an earlier answer is still in use")
        timeline = TimedConnector.timeline
        timeline.clear()
        started_s = time.monotonic()
        ttft_s, text = self._generate(job.name, prompt)
        receipt = self._receipt(job.name)
        if job.hit and not receipt.loaded_tokens:
            raise Refused(f"{job.name}: nothing was loaded. {receipt.sentence}")
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
def _engine(folder: str, dtype: str, config: Config) -> Iterator[_Engine]:
    """An engine with such a pool, which is gone afterwards."""
    transfer = KVTransferConfig(
        kv_connector=TimedConnector.__name__,
        kv_connector_module_path=TimedConnector.__module__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=msgspec.to_builtins(config),
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
