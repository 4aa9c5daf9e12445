"""What a forward that is replayed as one full graph, whose layers call no hook, has waited for before it starts."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here (make test installs a CPU build)"),
]
LAYERS = 3


class Recording:
    """Stands where the worker does and writes down what is begun and waited for."""

    def __init__(self):
        self.calls, self.mover = [], SimpleNamespace(mark=lambda: None)

    def begin(self, orders, after):
        self.calls.append("begin")
        return SimpleNamespace(wait=self.calls.append)


@pytest.fixture
def hooks():
    from layercast.connector.vllm.stats import Stats
    from layercast.connector.vllm.worker import WorkerHooks

    class Hooks(WorkerHooks):
        def __init__(self):
            self._step, self._failed_blocks, self._awaited = None, set(), {}
            self._worker, self._stats = Recording(), Stats()
            self._layers, self._unheard = {f"layers.{n}": n for n in range(LAYERS)}, set()

    Hooks.__abstractmethods__ = frozenset()
    return Hooks()


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("what", ["loads", "joins"])
def test_a_full_graph_that_reads_a_load_or_joins_one_waits_for_all_layers_before_it_starts(hooks, what, full):
    from vllm.config import CUDAGraphMode

    from layercast.connector.vllm.metadata import Orders
    from layercast.flow.orders import BlockPairs, LoadOrder, StepOrders

    load = LoadOrder("load-1", "hit", 32, (BlockPairs(0, (0, 1), (2, 3)),), 1)
    orders = StepOrders(1, **{what: (load,) if what == "loads" else ("hit",)})
    hooks.bind_connector_metadata(Orders(orders))
    assert hooks._worker.calls == []
    mode = CUDAGraphMode.FULL if full else CUDAGraphMode.NONE
    hooks.start_load_kv(SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=mode))
    assert hooks._worker.calls == ["begin", *(range(LAYERS) if full else ())]
