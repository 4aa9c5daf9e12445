"""What a forward that is replayed as one full graph, whose layers call no hook, has waited for before it starts."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from layercast.flow.orders import BlockPairs, LoadOrder, StepOrders, StepReport
from layercast.spec.groups import GroupKind, GroupSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here (make test installs a CPU build)"),
]
LAYERS = 3
LOAD = LoadOrder("load-1", "hit", 32, (BlockPairs(0, (0, 1), (2, 3)),), 1)
QUEUED = ("all that is queued",)


class Recording:
    """Stands where the worker does and writes down what is begun and waited for."""

    def __init__(self):
        self.calls, self.mover = [], SimpleNamespace(mark=lambda: "all that is queued")

    def begin(self, orders, after):
        self.after = after
        self.calls.append("begin")
        return SimpleNamespace(wait=self.calls.append, number=orders.step, add=lambda orders: None)


@pytest.fixture
def hooks():
    from layercast.connector.vllm.stats import Stats
    from layercast.connector.vllm.worker import WorkerHooks

    class Hooks(WorkerHooks):
        def __init__(self):
            self._step, self._failed_blocks, self._awaited = None, set(), {}
            self._worker, self._stats = Recording(), Stats()
            self._layers, self._unheard = {f"layers.{n}": n for n in range(LAYERS)}, set()
            self._vllm_config = SimpleNamespace(speculative_config=None)
            self._kv_transfer_config = SimpleNamespace(is_kv_consumer=True)
            self.group(GroupKind.FULL)

        def group(self, kind):
            spec = GroupSpec("g", kind, 16, tuple(range(LAYERS)), 64 if kind is GroupKind.WINDOW else None)
            self._handshake = SimpleNamespace(facts=SimpleNamespace(specs=(spec,)))

    Hooks.__abstractmethods__ = frozenset()
    return Hooks()


def orders_with(what, early=False, step=1):
    from layercast.connector.vllm.metadata import Orders

    return Orders(StepOrders(step, **{what: ("hit",) if what == "joins" else (LOAD,)}), early=early)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("what", ["loads", "joins"])
def test_a_full_graph_that_reads_a_load_or_joins_one_waits_for_all_layers_before_it_starts(hooks, what, full):
    from vllm.config import CUDAGraphMode

    hooks.bind_connector_metadata(orders_with(what))
    assert hooks._worker.calls == []
    mode = CUDAGraphMode.FULL if full else CUDAGraphMode.NONE
    hooks.start_load_kv(SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=mode))
    assert hooks._worker.calls == ["begin", *(range(LAYERS) if full else ())]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("what", ["loads", "background"])
def test_a_step_begun_early_is_not_begun_again_and_its_forward_waits_as_ever(hooks, what, full):
    from vllm.config import CUDAGraphMode

    metadata = orders_with(what, early=True)
    for _ in range(2):  # by the scheduler's side, then by vLLM's runner
        hooks.handle_preemptions(metadata)
        assert hooks._worker.calls == ["begin"]
    hooks.bind_connector_metadata(metadata)
    mode = CUDAGraphMode.FULL if full else CUDAGraphMode.NONE
    hooks.start_load_kv(SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=mode))
    assert hooks._worker.calls == ["begin", *(range(LAYERS) if full and what == "loads" else ())]


def test_layers_call_their_hooks_in_steps_that_move_something_and_until_each_was_heard_once(hooks):
    from layercast.connector.vllm.metadata import NOTHING

    assert not hooks.has_connector_metadata()
    hooks.bind_connector_metadata(NOTHING)
    assert not hooks.has_connector_metadata()
    hooks._unheard = {"layers.0"}
    assert hooks.has_connector_metadata()
    hooks.save_kv_layer("layers.0", None, None)
    assert not hooks.has_connector_metadata()
    hooks.handle_preemptions(orders_with("loads", early=True))
    assert hooks.has_connector_metadata()


@pytest.mark.parametrize(
    ("kind", "drafts", "after"),
    [
        (GroupKind.FULL, None, ()),
        (GroupKind.LATENT, None, ()),
        (GroupKind.WINDOW, None, QUEUED),
        (GroupKind.FULL, "mtp", QUEUED),
    ],
)
def test_loads_wait_for_no_forward_where_none_uses_their_blocks_any_more(hooks, kind, drafts, after):
    """What leaves a window is free while a forward still reads it, and so may be what a draft writes."""
    hooks.group(kind)
    hooks._vllm_config.speculative_config = drafts
    hooks.handle_preemptions(orders_with("loads", early=True))
    assert hooks._worker.after == after
    hooks._step = None
    hooks.bind_connector_metadata(orders_with("background"))
    assert hooks._worker.after == QUEUED


def test_loads_wait_for_forwards_where_vllm_takes_the_engine_for_a_producer_as_it_frees_blocks_at_once_there(
    hooks, monkeypatch
):
    """Inside MultiConnector it goes by that one's role, whatever ours is."""
    from layercast.connector.vllm import worker

    outer = SimpleNamespace(_kv_transfer_config=SimpleNamespace(is_kv_consumer=False))
    monkeypatch.setattr(worker, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(worker, "get_kv_transfer_group", lambda: outer)
    hooks.handle_preemptions(orders_with("loads", early=True))
    assert hooks._worker.after == ("all that is queued",)


def test_only_what_says_so_is_begun_early(hooks):
    hooks.handle_preemptions(orders_with("loads"))
    assert hooks._worker.calls == []


def test_a_step_begun_early_whose_forward_never_came_is_ended_before_the_next(hooks):
    hooks.handle_preemptions(orders_with("loads", early=True))
    hooks._step.reads, hooks._step.end = (), lambda _: hooks._worker.calls.append("end") or StepReport(1, ())
    hooks._step.abandon = lambda: hooks._worker.calls.append("abandon")
    hooks.bind_connector_metadata(orders_with("loads", step=2))
    assert hooks._worker.calls == ["begin", "abandon", "end"]
    assert hooks._step is None


@pytest.mark.parametrize("same", [True, False])
def test_a_step_is_begun_by_the_schedulers_side_only_where_the_worker_in_its_process_is_its_engines(
    hooks, same, monkeypatch
):
    """Another engine of this process may have its worker here, while this one's are processes of their own."""
    from layercast.connector.vllm import connector
    from layercast.connector.vllm.due import Due

    class Scheduler(connector.LayercastConnector):
        _steps_apart = True

        def __init__(self):
            self._kv_transfer_config, self._due = SimpleNamespace(engine_id="ours"), Due()
            self._due.loads.append(LOAD)

    hooks._kv_transfer_config = SimpleNamespace(engine_id="ours" if same else "theirs", is_kv_consumer=True)
    monkeypatch.setattr(Scheduler, "__abstractmethods__", frozenset())
    monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(connector, "get_kv_transfer_group", lambda: hooks)
    Scheduler()._loads_are_known(SimpleNamespace())
    assert hooks._worker.calls == (["begin"] if same else [])
