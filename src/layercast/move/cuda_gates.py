"""Gates of a forward on a device: by events, for forwards that call hooks, and by flags, for captured ones.

Neither knows what the flights copy.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from layercast.errors import BadTransition, DeadlineExceeded
from layercast.move.base import Flight, Gate
from layercast.move.cuda import torch_stream
from layercast.move.cuda_driver import Driver
from layercast.move.cuda_flights import CudaFlight
from layercast.move.cuda_hold import Hold, best_hold
from layercast.move.gates import CpuGate
from layercast.move.words import words_at

_LOOK_AGAIN_S = 0.05
"""A waiter that a reset passed by between two looks sleeps no longer than this."""


class CudaGate(CpuGate):
    """The caller's stream waits for the copies; the caller itself only until the device has been handed them.

    A flight that is not the device's (bytes from a peer) is waited for by the caller, as on a CPU.
    """

    def __init__(
        self, driver: Driver, current_stream: Callable[[], int] | None = None, hold: Hold | None = None
    ) -> None:
        super().__init__()
        self._hold = hold or best_hold(driver.calls)
        self._current_stream = current_stream or torch_stream
        self._flights: dict[int, list[CudaFlight]] = {}

    def arm(self, flights: Mapping[int, int]) -> None:
        """Close each layer's gate until a device has been handed that many flights, or they have ended.

        Raises BadTransition while one is closed.
        """
        with self._changed:
            closed = [layer for layer, ours in self._flights.items() if not all(map(CudaFlight.handed, ours))]
            if closed:
                raise BadTransition(f"the gates of layers {closed} are still closed; wait for them or reset first")
            super().arm(flights)
            self._flights = {}

    def arm_behind(self, flights: Mapping[int, int], under_way: Sequence[tuple[Mapping[int, int], Flight]]) -> None:
        """As `Gate` says; what a device has been given already is not counted but looked up by who waits."""
        with self._changed:
            super().arm_behind(flights, [(parts, one) for parts, one in under_way if not isinstance(one, CudaFlight)])
            for parts, one in under_way:
                if isinstance(one, CudaFlight):
                    for layer, nth in parts.items():
                        self._flights.setdefault(layer, []).append(one.part(nth))

    def open(self, layer: int, after: Flight) -> None:
        """Count `after` against the layer's gate. Returns at once."""
        self.open_all([(layer, after)])

    def open_all(self, passed: Iterable[tuple[int, Flight]]) -> None:
        """`open` for each (layer, flight)."""
        with self._changed:
            for layer, after in passed:
                if not isinstance(after, CudaFlight):
                    super().open(layer, after)
                elif left := self._missing.get(layer, 0):
                    # `wait` looks without the lock: it finds the layer closed until it finds every flight
                    self._flights.setdefault(layer, []).append(after)
                    if left > 1:
                        self._missing[layer] = left - 1
                    else:
                        del self._missing[layer]
            self._changed.notify_all()

    def wait(self, layer: int, timeout_s: float) -> float:
        """Make the caller's stream wait for the layer's copies; seconds the caller was blocked.

        Raises DeadlineExceeded after `timeout_s` seconds.
        """
        epoch = self._epoch
        if layer not in self._missing and self._held(layer):
            return 0.0
        start = time.monotonic()
        super().wait(layer, timeout_s)
        for flight in self._flights.get(layer, ()):
            self._sleep(flight, layer, epoch, start + timeout_s)
        blocked = time.monotonic() - start
        if epoch == self._epoch:
            self._held(layer)
        return blocked

    def reset(self) -> None:
        """Open every gate and forget what was armed; late flights of the old arming change nothing."""
        with self._changed:
            self._flights = {}
            super().reset()

    def _held(self, layer: int) -> bool:
        """Have the caller's stream wait for what the device has of a layer's copies; whether it has them all."""
        handed, flights = True, self._flights.get(layer)
        if flights is not None:
            stream = self._current_stream()
            for flight in flights:
                handed = flight.hold(self._hold, stream) and handed
        return handed

    def _sleep(self, flight: CudaFlight, layer: int, epoch: int, deadline: float) -> None:
        while not flight.handed(max(0.0, min(deadline - time.monotonic(), _LOOK_AGAIN_S))) and epoch == self._epoch:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"layer {layer}: a copy has not been issued in time")


class FlagGate(Gate):
    """One 32-bit flag a layer in pinned memory, on which a captured forward waits by itself.

    `capture_wait` puts the wait into a graph, once; every step then arms, launches the graph, and loads. The copies
    set the flags: hand `flag(layer)` to `CudaMover.submit_all`, or let `open` set them from the host. A flag that
    nobody sets holds the device: whoever launches the graph calls `reset` by its own deadline, which sets them all.
    Arm only while no graph that waits on these flags is under way.
    """

    def __init__(self, driver: Driver, layers: int) -> None:
        self._driver = driver
        self._layers = layers
        self._base = driver.host_memory(4 * layers)
        self._flags = words_at(self._base, layers)
        self._flags[:] = 1
        self._host = CpuGate()

    def flag(self, layer: int) -> int:
        """The address of a layer's flag: 0 = closed, 1 = open."""
        return self._base + 4 * layer

    def capture_wait(self, layer: int, stream: int) -> None:
        """Have the stream, or the graph it is being captured into, wait for the layer's flag."""
        self._driver.stream_waits_for_value(stream, self.flag(layer), 1)

    def arm(self, flights: Mapping[int, int]) -> None:
        """Close the flags of layers that something moves in. Raises BadTransition while one is closed."""
        self._host.arm(flights)
        for layer in range(self._layers):
            self._flags[layer] = 0 if flights.get(layer, 0) else 1

    def open(self, layer: int, after: Flight) -> None:
        """Count `after` against the layer's gate once it has ended, well or not; the last of them sets the flag."""
        self._host.open(layer, after)
        after.then(lambda _: self._set(layer))

    def wait(self, layer: int, timeout_s: float) -> float:
        """Block the caller until the layer's gate is open, for forwards that are not captured.

        Raises DeadlineExceeded.
        """
        return self._host.wait(layer, timeout_s)

    def reset(self) -> None:
        """Set every flag and forget what was armed."""
        self._host.reset()
        self._flags[:] = 1

    def close(self) -> None:
        """Give the flags' memory back. No graph that waits on them may run any more; flights may still end."""
        self._flags = self._flags.copy()
        self._driver.drop_host_memory(self._base)

    def _set(self, layer: int) -> None:
        if self._host.is_open(layer):
            self._flags[layer] = 1
