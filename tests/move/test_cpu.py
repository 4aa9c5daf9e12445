import tracemalloc

import numpy as np

from layercast.move.cpu import CpuMover
from layercast.testing.move_laws import SOON_S, MoverLaws, pieces_of


class TestCpuMover(MoverLaws):
    def make_mover(self):
        return CpuMover()

    def test_copying_stages_nothing(self, mover):
        size, blocks = 1 << 16, 1024
        source, target = np.ones(2 * size * blocks, np.uint8), np.ones(2 * size * blocks, np.uint8)
        runs = pieces_of((source.ctypes.data, target.ctypes.data, size, blocks, 2 * size, 2 * size))
        plain = pieces_of(
            *((source.ctypes.data + i * 2 * size, target.ctypes.data + i * 2 * size, size) for i in range(blocks))
        )
        tracemalloc.start()
        for pieces in (runs, plain):
            mover.submit(pieces).wait(SOON_S)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < size * blocks // 64
        assert mover.staging_bytes == 0
