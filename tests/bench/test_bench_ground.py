import mmap
from contextlib import ExitStack, closing
from types import SimpleNamespace

import numpy as np
import pytest
from host_device import HostDevice

torch = pytest.importorskip("torch", reason="torch is not installed")

from layercast.bench import ground as room  # noqa: E402
from layercast.bench.ground import Ground, Shape, engine_layout, huge_bytes  # noqa: E402
from layercast.bench.overlap import Run  # noqa: E402
from layercast.bench.rivals import Rival, rivals  # noqa: E402
from layercast.flow import batches  # noqa: E402
from layercast.move.cuda import CudaMover  # noqa: E402
from layercast.move.cuda_driver import DEVICE, HOST  # noqa: E402
from layercast.move.cuda_issue import plain_issue  # noqa: E402
from layercast.move.cuda_ways import rows_of  # noqa: E402
from layercast.plan.pieces import route_between  # noqa: E402
from layercast.store.slab import Slab, slab_bytes  # noqa: E402

SHAPE = Shape(layers=2, heads=4, kv_heads=2, width=8, hidden=32, inner=64, block=4)


def pools(blocks):
    return [torch.zeros(blocks, SHAPE.block_bytes // 2, dtype=torch.bfloat16) for _ in range(SHAPE.layers)]


def test_a_pool_is_registered_as_whole_blocks():
    made = pools(6)
    (group,) = engine_layout(SHAPE, made).groups
    assert (group.blocks, group.block_bytes) == (6, SHAPE.layers * SHAPE.block_bytes)
    assert [group.planes_of(n)[0].base for n in range(SHAPE.layers)] == [pool.data_ptr() for pool in made]


def test_halves_copy_every_byte_once_and_never_merge():
    source, target = pools(16), pools(16)
    groups = [engine_layout(SHAPE, side).groups[0] for side in (source, target)]
    plan = route_between(*groups).plan(list(range(0, 16, 2)), list(range(15, 0, -2)))
    whole, halves = rows_of(plan.layer(1)), rows_of(room._halves(plan.layer(1)))
    assert len(halves) == 2 * len(whole)
    assert halves.length.sum() == whole.length.sum()
    for side in ("source", "target"):
        covered = np.sort(getattr(halves, side))
        assert np.array_equal(np.unique(covered), covered)
        assert set(getattr(whole, side)) <= set(covered)
    order = np.argsort(halves.source)
    touching = np.diff(halves.source[order]) == halves.length[order][:-1]
    assert not np.any(touching & (np.diff(halves.target[order]) == halves.length[order][:-1]))


def test_one_wrong_word_in_a_block_that_is_probed_has_not_arrived():
    engine, blocks = engine_layout(SHAPE, made := pools(6)), 5
    with closing(Slab.create(engine, slab_bytes(engine, (blocks,)))) as slab:
        ids, slots = np.array([4, 0, 5, 2, 3]), np.array([3, 1, 0, 4, 2])
        here = Ground(None, SHAPE, blocks, made, slab, None, ids, slots, None, None, "")
        here.host[:] = np.random.default_rng(0).integers(1, 1 << 20, len(here.host), np.int32)
        seen, words = [pool.view(torch.int32).numpy() for pool in made], SHAPE.block_bytes // 4
        for arrived, fill in (
            (here.arrived, lambda n: (ids, here.wanted(n))),
            (here.arrived_in_order, lambda n: (slice(blocks), here.host[n * blocks * words :][: blocks * words])),
        ):
            for n in range(SHAPE.layers):
                where, content = fill(n)
                seen[n][where] = content.reshape(blocks, words)
            assert arrived()
            seen[1][ids[1]] ^= 1
            assert not arrived()


def test_huge_pages_are_counted_of_the_mapping_that_is_asked_for():
    with mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory[:] = bytes(8 << 20)
        assert huge_bytes(address) == 0
    assert huge_bytes(0) == 0


def test_a_rival_that_is_missing_or_broken_or_wrong_is_named_and_the_others_run(monkeypatch):
    def missing(_):
        raise ModuleNotFoundError("No module named 'x'", name="x")

    def broken(_):
        raise RuntimeError("no kernel image\nmore")

    def mute(_):
        raise AssertionError

    nothing = lambda: lambda: None  # noqa: E731
    makers = {
        "one_a_block": lambda _: {"one copy a block": Rival(nothing, nothing)},
        "index_copy": lambda _: {"index_copy_": Rival(nothing, nothing, lambda: False)},
        "vllm_swap": missing,
        "sgl_kernels": broken,
        "lmcache_layers": mute,
    }
    for name, make in makers.items():
        monkeypatch.setattr(f"layercast.bench.rivals.{name}", make)
    found, absent = rivals(None)
    assert set(found) == {"one copy a block"}
    assert absent == {
        "index_copy_": "did not bring the blocks back",
        "vLLM swap_blocks_batch": "not installed (x)",
        "sgl-kernel transfer_kv": "does not work here (RuntimeError: no kernel image)",
        "LMCache layerwise": "does not work here (AssertionError: it does not say why)",
    }


@pytest.mark.parametrize("at_once", [0, 1 << 30])
@pytest.mark.parametrize("tokens", [None, 8])
def test_what_is_saved_as_a_worker_saves_it_is_every_layer_of_the_first_tokens(monkeypatch, tokens, at_once):
    monkeypatch.setattr(batches, "AT_ONCE_BYTES", at_once)
    made, count = pools(6), 6 if tokens is None else tokens // SHAPE.block
    for pool in made:
        pool.copy_(torch.rand(pool.shape))
    engine, device = engine_layout(SHAPE, made), HostDevice()
    for pool in made:
        device.memory[pool.data_ptr()] = (DEVICE, pool.numel() * 2, pool)
    with closing(Slab.create(engine, slab_bytes(engine, (6,)))) as slab:
        device.memory[np.frombuffer(slab.owner, np.uint8).ctypes.data] = (HOST, len(slab.owner), None)
        ids, slots = np.array([4, 0, 5, 2, 3, 1]), np.array([3, 1, 0, 4, 2, 5])
        saving = route_between(engine.groups[0], slab.layout.groups[0])
        here = Ground(None, SHAPE, 6, made, slab, None, ids, slots, None, saving, "")
        with ExitStack() as stack:
            mover = CudaMover(device, None, plain_issue(device.calls, (0, 0)), lambda: 1)
            stack.callback(mover.close, 10.0)
            run = SimpleNamespace(here=here, auto=mover, forward=SimpleNamespace(new=tokens), ms=lambda body: body())
            run.layerwise = lambda _, written: [written(layer) for layer in range(SHAPE.layers)]
            Run.saving(run)
        for n, pool in enumerate(made):
            assert np.array_equal(here.wanted(n)[:count], pool.view(torch.int32).numpy()[ids[:count]])
            assert not here.wanted(n)[count:].any()
