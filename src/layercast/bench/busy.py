"""`layercast bench busy`: the same beside a Python thread that never sleeps, the interpreter lock being all they share.

A forward of a thousand small calls takes seconds there, as each that gives the lock up waits 5 ms to have it again.
Does not know what a layer's gate is, nor how copies are issued.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import torch

from layercast.bench.ground import Device, Shape, ground
from layercast.bench.model import Forward, Weights
from layercast.bench.overlap import ALONE, FEW, Run
from layercast.bench.results import SOON_S, Table, in_turn, ratio, spread
from layercast.move.cuda import CudaMover
from layercast.move.words import words_at

LAYERWISE, MOVED = "layerwise", "from the order to the last copy"


def busy(device: Device, shape: Shape, length: tuple[int, int], repeats: int) -> Iterator[Table]:
    """A table of the compiled loop, then one of the loop in Python. length: (cached, new) tokens."""
    cached, new = length
    with ground(device, shape, cached) as here, closing(Run(here, Forward(Weights(shape), here, new))) as run:
        for loop, mover, rounds in ("compiled loop", run.auto, repeats), ("Python loop", run.plain, FEW):
            yield _beside_python(run, mover, rounds, f"Beside a busy Python thread, {cached}+{new} tokens, {loop}")


def _beside_python(run: Run, mover: CudaMover, rounds: int, title: str) -> Table:
    """Rounds without the busy thread, then rounds with it."""
    with closing(_Clock(run)) as clock:
        ways: dict[str, Callable[[], float]] = {
            ALONE: lambda: run.ms(run.forward),
            LAYERWISE: lambda: run.ms(lambda: run.layerwise(mover)),
            MOVED: lambda: clock.ms(mover),
        }
        quiet = in_turn(ways, rounds)
        with _spinning():
            loud = in_turn(ways, rounds)
    rows = {name: spread("ms, busy", loud[name]) | ratio("of quiet", loud[name], quiet[name]) for name in ways}
    rows[LAYERWISE] |= ratio("of compute, both busy", loud[LAYERWISE], loud[ALONE])
    checks = {"the last forward read every block as saved": run.forward.read_right()}
    return Table(title=title, rows=rows, bar="ms, busy", best=ALONE, checks=checks)


class _Clock:
    """Times copies as the device sees them: nothing between the two events gives the interpreter up but the mover."""

    def __init__(self, run: Run) -> None:
        self._run, self._driver = run, run.here.device.driver
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in self._first, self._last:
            event.record()  # makes it
        self._flag = self._driver.host_memory(4)

    def ms(self, mover: CudaMover) -> float:
        """ms from an event right before the order to one behind the flag that the device sets behind the last copy."""
        here, step = self._run.here, self._run.here.step(up=True)
        torch.cuda.synchronize()
        words_at(self._flag, 1)[0] = 0
        self._driver.stream_waits_for_value(here.device.copying.cuda_stream, self._flag, 1)
        self._driver.record(self._last.cuda_event, here.device.copying.cuda_stream)
        self._driver.record(self._first.cuda_event, here.device.compute.cuda_stream)
        (flight,) = mover.submit_all([step], flags=[self._flag])
        flight.wait(SOON_S)
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last))

    def close(self) -> None:
        """Give the flag back, set, so that a stream whose copies were never ordered waits no longer."""
        words_at(self._flag, 1)[0] = 1
        torch.cuda.synchronize()
        self._driver.drop_host_memory(self._flag)


@contextmanager
def _spinning() -> Iterator[None]:
    """A thread that counts for as long as the block runs."""
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            count += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
