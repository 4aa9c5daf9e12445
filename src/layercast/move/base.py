"""What a mover and a gate must do on any device.

A mover copies pieces in the order they are submitted and hands back a flight for each. A device's mover keeps that
order within a direction (to the device, from it, inside it), and apart from it in the background; else `after` says it.
A gate is what the attention of a layer waits on. Neither knows requests, blocks, keys or stores.

Laws (see `testing.MoverLaws`, `testing.GateLaws`):
- a flight lands only after the flights of its `after`, and after every byte of it is in place;
- a flight that fails says so through `wait` and `error`, and never stops the mover or a later flight;
- whatever `keep` holds stays alive until the flight has landed;
- a gate opens once per arming, when as many flights as it was armed with have ended, well or not.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from layercast.errors import BrokenInvariant
from layercast.landing import Landing
from layercast.plan.pieces import DigestRanges, Pieces, Series

Digests = npt.NDArray[np.uint64]


class Flight(Protocol):
    """One submitted piece of work, from submission to landing."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it has ended; None if it landed or is still under way."""
        ...

    def promised(self, timeout_s: float) -> bool:
        """Whether a device has it in its queue and has not refused it, so that whoever passes a gate behind it finds it
        in place. What is still being handed over is waited for, up to `timeout_s` seconds."""
        ...

    def part(self, nth: int) -> "Flight":
        """The flight of one part of a series."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until it has landed. Raises its error, or DeadlineExceeded after `timeout_s` seconds."""
        ...

    def then(self, call: Callable[["Flight"], None]) -> None:
        """Call `call(flight)` once it has ended: at once if it has, else on the mover's thread. Must not block."""
        ...


class Waits(StrEnum):
    """Who waits for what is loaded."""

    IDLE = "idle"
    """A forward whose thread has launched it all, such as a captured one: what counts is how soon the bytes are there.
    """
    BUSY = "busy"
    """An engine's forward: what keeps the thread that prepares and launches it costs more than bytes that come late."""
    NOBODY = "nobody"
    """Nobody yet: it goes in the background."""


class Mover(ABC):
    """Copies pieces between memories of this process."""

    @abstractmethod
    def submit(self, pieces: Pieces, *, after: Sequence[Flight] = (), keep: Sequence[object] = ()) -> Flight:
        """Copy `pieces` once every flight in `after` has landed. Returns at once.

        If a flight in `after` failed, this one fails with the same error and copies nothing.
        """

    def submit_all(
        self,
        batches: Sequence[Pieces | Series],
        *,
        after: Sequence[Sequence[Flight]] = (),
        keep: Sequence[object] = (),
        waits: Waits = Waits.IDLE,
    ) -> Sequence[Flight]:
        """Copy several batches, begun in this order, each behind its own `after`; a flight for each. Returns at once.

        None may touch memory that another of them writes, as they may overlap; submissions do not. Of series the parts
        go by their turns. waits: where nobody does, what is submitted later may go first, and may touch nothing that
        these do; else a device may choose by it how loads go. What can't be submitted is a failed flight, and the
        others move all the same.
        """
        return [
            self._submitted(pieces, behind, keep)
            for pieces, behind in zip(batches, after or ((),) * len(batches), strict=True)
        ]

    @property
    def whole_steps(self) -> bool:
        """Whether batches want to be submitted many at a time, and what follows them is ordered by the device."""
        return False

    @abstractmethod
    def digest(self, ranges: DigestRanges, *, after: Sequence[Flight] = ()) -> "DigestFlight":
        """One uint64 a row of `ranges`: the 64-bit XXH3 of its ranges' bytes, joined in order."""

    @abstractmethod
    def mark(self) -> Flight:
        """A flight that lands once all work queued so far on the caller's compute has finished.

        On a CPU the caller's writes are done when it calls; on a device this is an event on the current stream.
        """

    def _submitted(self, batch: Pieces | Series, after: Sequence[Flight], keep: Sequence[object]) -> Flight:
        try:
            pieces = batch if isinstance(batch, Pieces) else Pieces.join(list(batch))
            return self.submit(pieces, after=after, keep=keep)
        except Exception as error:  # noqa: BLE001  what a mover can't do fails one batch, and no thread
            failed = Landing()
            failed.fail(error)
            return failed

    def aside(self, call: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        """Run `call` soon, then `then(its error)`; on the mover's own thread, where it has one for such.

        Never raises.
        """
        run_and_tell(call, then)

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Most bytes of staging memory held at one time since the start."""

    @property
    def halted(self) -> str:
        """Why nothing is moved any more, of a mover that has ended by itself; empty while it works."""
        return ""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Finish what was submitted and end the threads. Raises DeadlineExceeded."""


def run_and_tell(call: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
    """Run `call`, then `then(its error)`, also where the thread ends in the midst of it."""
    error: Exception | None = BrokenInvariant("the thread ended in the midst of it")
    try:
        call()
        error = None
    except Exception as raised:  # noqa: BLE001  one job's trouble is its own
        error = raised
    finally:
        then(error)


class MoverOver(Mover):
    """A mover over another one, whose copies alone are its own."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def digest(self, ranges: DigestRanges, *, after: Sequence[Flight] = ()) -> "DigestFlight":
        """The other's digests."""
        return self._mover.digest(ranges, after=after)

    def mark(self) -> Flight:
        """The other's mark."""
        return self._mover.mark()

    def aside(self, call: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        """On the other's thread."""
        self._mover.aside(call, then)

    @property
    def staging_bytes(self) -> int:
        """The other's staging."""
        return self._mover.staging_bytes

    @property
    def halted(self) -> str:
        """Why the other has ended by itself."""
        return self._mover.halted


class DigestFlight(Flight, Protocol):
    """A flight whose result is the digests it computed."""

    @property
    def digests(self) -> Digests:
        """One uint64 a block; only after it has landed."""
        ...


class Gate(ABC):
    """One gate a layer, armed anew for every step."""

    @abstractmethod
    def arm(self, flights: Mapping[int, int]) -> None:
        """Close each layer's gate until that many flights have passed through `open`. 0 leaves it open.

        Raises BadTransition while a layer armed earlier is still closed.
        """

    def arm_behind(self, flights: Mapping[int, int], under_way: Sequence[tuple[Mapping[int, int], Flight]]) -> None:
        """`arm` with that many flights, and with some that are under way, which pass at once.

        under_way: for each the part that counts against each layer, by layer. Raises BadTransition.
        """
        self.arm(Counter(flights) + Counter(layer for parts, _ in under_way for layer in parts))
        self.open_all([(layer, flight.part(nth)) for parts, flight in under_way for layer, nth in parts.items()])

    @abstractmethod
    def open(self, layer: int, after: Flight) -> None:
        """Count `after` against the layer's gate once it has ended, well or not. Returns at once."""

    def open_all(self, passed: Iterable[tuple[int, Flight]]) -> None:
        """`open` for each (layer, flight)."""
        for layer, after in passed:
            self.open(layer, after)

    @abstractmethod
    def wait(self, layer: int, timeout_s: float) -> float:
        """Make the caller's compute wait until the layer's gate is open; seconds the caller was blocked.

        Raises DeadlineExceeded after `timeout_s` seconds.
        """

    @abstractmethod
    def reset(self) -> None:
        """Open every gate and forget what was armed; late flights of the old arming change nothing."""
