"""A worker over a GPU's memory, from orders to reports. Without a GPU, everything here is skipped."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

from layercast.config import Config  # noqa: E402
from layercast.control.node import open_worker  # noqa: E402
from layercast.flow.orders import BlockPairs, LoadEnd, LoadOrder, SaveOrder, StepOrders  # noqa: E402
from layercast.move.cuda import CudaMover  # noqa: E402
from layercast.move.cuda_desk import Desk  # noqa: E402
from layercast.spec.groups import GroupKind, GroupSpec, layout_of  # noqa: E402
from layercast.spec.planes import PlaneKind, plane_of_tensor  # noqa: E402

LAYERS, BLOCKS, WORDS, SOON_S = 6, 64, 4096, 20.0


class Engine:
    """K and V of each layer in one tensor, as engines on a GPU have them; a forward that reads behind its gates."""

    def __init__(self):
        self.pools = [torch.zeros(2, BLOCKS, WORDS, dtype=torch.int32, device="cuda") for _ in range(LAYERS)]
        planes = [
            plane_of_tensor(
                f"layers.{n}",
                n,
                PlaneKind.KV,
                "int32",
                pool.data_ptr(),
                pool.shape,
                pool.stride(),
                ("kv", "block", "content"),
            )
            for n, pool in enumerate(self.pools)
        ]
        self.layout = layout_of([GroupSpec("full", GroupKind.FULL, 16, tuple(range(LAYERS)))], planes)
        self.stream = torch.cuda.Stream()

    def fill(self, seed):
        torch.manual_seed(seed)
        for pool in self.pools:
            pool.random_()
        torch.cuda.synchronize()

    def forward(self, step, read=(), slow=0):
        """What each layer's blocks held as it ran, with nothing of it waited for by the host.

        read: block numbers, a tensor on the device if the host is not to wait for that.
        """
        seen, read = [], read if torch.is_tensor(read) else torch.tensor(list(map(int, read)), device="cuda")
        with torch.cuda.stream(self.stream):
            for layer, pool in enumerate(self.pools):
                torch.cuda._sleep(slow)
                step.wait(layer)
                seen.append(pool.index_select(1, read))
                step.written(layer)
        return seen


@contextmanager
def worker_over(engine, **settings):
    threads = threading.active_count()
    config = Config(host_bytes=64 << 20, kv_recompute_threshold=0, layer_wait_ms=5000, **settings)
    with open_worker(engine.layout, config, keep=engine.pools) as worker:
        assert isinstance(worker.mover, CudaMover)
        yield worker
    assert threading.active_count() == threads


@pytest.fixture
def engine():
    return Engine()


def begun(worker, engine, **orders):
    with torch.cuda.stream(engine.stream):
        return worker.begin(StepOrders(1, **orders), after=(worker.mover.mark(),))


def pairs(slots, blocks):
    return (BlockPairs(0, tuple(map(int, slots)), tuple(map(int, blocks))),)


def load(name, slots, blocks, window=1):
    return LoadOrder(name, name, 16 * len(slots), pairs(slots, blocks), window)


def ended(worker):
    worker.quiet(SOON_S)
    return worker.report(99)


def saved(worker, engine, slots, blocks, slow=0):
    step = begun(worker, engine, saves=(SaveOrder("save", "save", pairs(slots, blocks)),))
    engine.forward(step, slow=slow)
    report = step.end()
    outcomes = [*report.saves, *ended(worker).saves]
    assert [outcome.saved for outcome in outcomes] == [True], outcomes
    assert outcomes[0].layers == LAYERS


@pytest.mark.parametrize("settings", [{}, {"verify": False}, {"layerwise_window": 4}, {"use_layerwise": False}])
def test_what_was_saved_comes_back_where_a_forward_reads_it(engine, settings):
    with worker_over(engine, **settings) as worker:
        choose = np.random.default_rng(0)
        for seed in range(5):
            engine.fill(seed)
            slots, blocks = choose.permutation(BLOCKS)[:40], choose.permutation(BLOCKS)[:40]
            kept = [pool[:, blocks].cpu() for pool in engine.pools]
            saved(worker, engine, slots, blocks, slow=100_000)
            engine.fill(seed + 100)
            other = choose.permutation(BLOCKS)[:40]
            untouched = np.setdiff1d(np.arange(BLOCKS), other)
            before = [pool[:, untouched].cpu() for pool in engine.pools]
            step = begun(worker, engine, loads=(load("load", slots, other, worker.ways.config.layerwise_window),))
            seen = engine.forward(step, other)
            report = step.end()
            assert report.failed == ()
            engine.stream.synchronize()
            assert all(torch.equal(got.cpu(), want) for got, want in zip(seen, kept, strict=True))
            assert all(torch.equal(p[:, untouched].cpu(), b) for p, b in zip(engine.pools, before, strict=True))
            (outcome,) = [*report.loads, *ended(worker).loads]
            assert (outcome.end, outcome.verified) == (LoadEnd.LANDED, False)
            assert worker.idle


def test_a_step_blocks_the_host_for_no_copy(engine):
    """The engine's stream is busy for a second: the loads stand behind it, and the whole step is over long before."""
    with worker_over(engine) as worker:
        engine.fill(0)
        saved(worker, engine, range(40), range(40))
        kept = [pool[:, :40].cpu() for pool in engine.pools]
        read = torch.arange(20, 60, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(engine.stream):
            torch.cuda._sleep(2_000_000_000)
        start = time.perf_counter()
        orders = {"loads": (load("load", range(40), range(20, 60)),)}
        step = begun(worker, engine, saves=(SaveOrder("again", "again", pairs(range(40), range(20, 60))),), **orders)
        seen = engine.forward(step, read)
        report = step.end()
        took = time.perf_counter() - start
        assert not engine.stream.query(), "the stream was still busy, or this shows nothing"
        assert took < 0.3
        assert report.failed == ()
        assert report.loads == ()
        engine.stream.synchronize()
        assert all(torch.equal(got.cpu(), want) for got, want in zip(seen, kept, strict=True))
        assert [o.end for o in ended(worker).loads] == [LoadEnd.LANDED]


def test_a_copy_that_the_device_refuses_fails_its_request_and_holds_nobody_up(engine, monkeypatch):
    with worker_over(engine) as worker:
        engine.fill(0)
        saved(worker, engine, range(40), range(40))
        issue, wrong = worker.mover._issue, threading.Event()
        wrong.set()

        def refused(table, cuts, errors, first):
            issue.run(table, cuts, errors, first)
            errors[0] |= wrong.is_set()

        monkeypatch.setattr(worker.mover, "_issue", issue._replace(run=refused))
        monkeypatch.setattr(Desk, "lay", lambda *_: False)
        step = begun(worker, engine, loads=(load("bad", range(4), range(60, 64)), load("good", range(4), range(4))))
        engine.forward(step, range(4))
        report = step.end()
        assert report.failed == ("bad",) or report.failed == ("good",)
        ends = {outcome.request: outcome.end for outcome in (*report.loads, *ended(worker).loads)}
        assert sorted(ends.values()) == [LoadEnd.LANDED, LoadEnd.LOST]
        wrong.clear()
        step = begun(worker, engine, loads=(load("next", range(4), range(60, 64)),))
        seen = engine.forward(step, range(60, 64))
        assert step.end().failed == ()
        engine.stream.synchronize()
        assert all(torch.equal(got, pool[:, :4]) for got, pool in zip(seen, engine.pools, strict=True))


def test_an_abort_and_background_loads_end_with_an_outcome_each(engine):
    with worker_over(engine) as worker:
        engine.fill(0)
        saved(worker, engine, range(40), range(40))
        step = begun(
            worker,
            engine,
            loads=(load("gone", range(8), range(40, 48)), load("stays", range(8), range(48, 56))),
            background=(load("later", range(8), range(56, 64)),),
        )
        worker.abort("gone")
        seen = engine.forward(step, range(48, 56))
        report = step.end()
        assert set(report.failed) <= {"gone"}
        engine.stream.synchronize()
        assert all(torch.equal(got, pool[:, :8]) for got, pool in zip(seen, engine.pools, strict=True))
        outcomes = {o.request: o.end for o in (*report.loads, *ended(worker).loads)}
        assert outcomes == {"gone": LoadEnd.ABORTED, "stays": LoadEnd.LANDED, "later": LoadEnd.LANDED}
        assert dict(worker.awaited()) == {"later": LoadEnd.LANDED}
        assert all(torch.equal(pool[:, 56:], pool[:, :8]) for pool in engine.pools)


def test_a_forward_that_fails_half_way_leaves_nothing_waiting(engine):
    with worker_over(engine) as worker:
        engine.fill(0)
        orders = StepOrders(1, saves=(SaveOrder("half", "half", pairs(range(8), range(8))),))
        with torch.cuda.stream(engine.stream):
            step = worker.begin(orders, after=(worker.mover.mark(),))
            step.wait(0)
            step.written(0)
        step.end()
        (outcome,) = ended(worker).saves
        assert (outcome.saved, outcome.swept_layers) == (True, LAYERS - 1)
