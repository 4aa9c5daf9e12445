"""How a stream goes on behind another: by an event; where the driver refuses that, once this thread has waited instead.

What was handed over before moves all the same. If others went on at once, a batch that has failed would be counted, and
its blocks given to somebody else, while a launch still writes them. Does not know what streams do.
"""

from collections.abc import Callable

from layercast.move.cuda_driver import Calls


def recording(calls: Calls) -> Callable[[int, int], int]:
    """(event, stream) -> error code: the event happens behind all that the stream has; if refused, that is over."""
    record, finish = calls.record, calls.finish

    def run(event: int, stream: int) -> int:
        code = record(event, stream)
        if code != 0:
            finish(stream)
        return code

    return run


def awaiting(calls: Calls) -> Callable[[int, int], int]:
    """(stream, event) -> error code: the stream goes on behind the event; if refused, that has happened."""
    wait, sleep = calls.wait, calls.sleep

    def run(stream: int, event: int) -> int:
        code = wait(stream, event, 0)
        if code != 0:
            sleep(event)
        return code

    return run
