import threading
import time

import numpy as np
import pytest

from layercast.move import raw
from layercast.testing.move_laws import pieces_of


@pytest.mark.parametrize("by_kernel", [True, False])
def test_many_plain_pieces_move_with_and_without_the_kernels_help(monkeypatch, by_kernel):
    if not by_kernel:
        monkeypatch.setattr(raw, "_readv", None)
    source = np.random.default_rng(0).integers(0, 256, 3000 * 700, np.uint8)
    target = np.zeros_like(source)
    order = np.random.default_rng(1).permutation(3000)
    rows = [(source.ctypes.data + 700 * i, target.ctypes.data + 700 * int(j), 700) for i, j in enumerate(order)]
    raw.copy(pieces_of(*rows))
    assert np.array_equal(target.reshape(3000, 700)[order], source.reshape(3000, 700))


@pytest.mark.parametrize("rows", [1, 2, 5, 200])
@pytest.mark.parametrize(("source_step", "target_step"), [(64, -96), (-64, 96), (-64, -96)])
def test_runs_may_step_backward_on_either_side(rows, source_step, target_step):
    source = np.random.default_rng(0).integers(0, 256, 64 * rows, np.uint8)
    target = np.zeros(96 * rows, np.uint8)
    from_ = source.ctypes.data + (rows - 1) * max(-source_step, 0)
    to = target.ctypes.data + (rows - 1) * max(-target_step, 0)
    raw.copy(pieces_of((from_, to, 50, rows, source_step, target_step)))
    wanted = source.reshape(rows, 64)[:, :50][:: 1 if source_step * target_step > 0 else -1]
    assert np.array_equal(target.reshape(rows, 96)[:, :50], wanted)
    assert not target.reshape(rows, 96)[:, 50:].any()


def test_memory_that_the_kernel_will_not_touch_is_copied_piece_by_piece(monkeypatch):
    calls = []
    monkeypatch.setattr(raw, "_readv", lambda *args: calls.append(args) or -1)
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    raw.copy(pieces_of(*((source.ctypes.data + i, target.ctypes.data + i, 1) for i in range(100))))
    assert len(calls) == 1
    assert np.array_equal(source, target)


def test_other_threads_run_during_a_long_copy():
    source, target = np.ones(1 << 28, np.uint8), np.ones(1 << 28, np.uint8)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    started = time.perf_counter()
    raw.copy(pieces_of((source.ctypes.data, target.ctypes.data, len(source))))
    ended = time.perf_counter()
    stop.set()
    ticker.join()
    middle = [at for at in ticks if started + (ended - started) * 0.25 < at < started + (ended - started) * 0.75]
    assert len(middle) > 100
