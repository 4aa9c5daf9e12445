"""The slab and what copies between it and an engine's memory: a GPU's mover where a GPU holds that, else the CPU's.

Does not know orders, keys or peers.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from layercast.config import Config
from layercast.errors import Refused
from layercast.move.base import Gate, Mover
from layercast.move.cpu import CpuMover
from layercast.move.cuda import CudaMover
from layercast.move.cuda_driver import device_holding
from layercast.move.cuda_gates import CudaGate
from layercast.move.cuda_pin import Pinning, near
from layercast.move.gates import CpuGate
from layercast.move.paced import PacedMover
from layercast.spec.groups import Layout
from layercast.store.slab import Slab

CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's slab, and how it is filled and emptied. on_device: whether the engine's memory is a GPU's."""

    slab: Slab
    mover: Mover
    gate: Gate
    on_device: bool


def open_memory(engine: Layout, config: Config, link_gbps: float | None, closing: ExitStack) -> Memory:
    """A slab of `config.host_bytes` for the engine's planes, and the mover that suits where they lie.

    link_gbps: pace copies to that many gigabits a second; only on a CPU. On a GPU the slab is pinned in the background
    and can be used before that is done. `closing` ends it all; that raises DeadlineExceeded after CLOSE_S seconds each.
    Raises Refused where planes lie on several devices.
    """
    devices = {device_holding(plane.base) for group in engine.groups for plane in group.planes}
    if len(devices) > 1:
        raise Refused(f"an engine's caches lie on {len(devices)} devices ({devices}); register one rank's at a time")
    device = devices.pop() if devices else None
    if device is None:
        slab = _slab(engine, config, closing)
        mover: Mover = CpuMover() if link_gbps is None else PacedMover(CpuMover(), link_gbps)
        closing.callback(mover.close, CLOSE_S)
        return Memory(slab, mover, CpuGate(), False)
    cuda = CudaMover.of(device)
    with near(cuda.driver.pci):
        slab = _slab(engine, config, closing)
    pinning = Pinning(cuda.driver, np.frombuffer(slab.owner, np.uint8).ctypes.data, len(slab.owner))
    closing.callback(pinning.close, CLOSE_S)
    closing.callback(cuda.close, CLOSE_S)
    cuda.follow(pinning)
    return Memory(slab, cuda, CudaGate(cuda.driver), True)


def _slab(engine: Layout, config: Config, closing: ExitStack) -> Slab:
    slab = Slab.create(engine, config.host_bytes)
    closing.callback(slab.close)
    return slab
