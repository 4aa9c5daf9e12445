"""A second process of the demo: its start, its end, and the pipe to it, on which both sides speak msgpack.

Does not know what it is asked.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

import msgspec

from layercast.errors import DeadlineExceeded, LayercastError, PeerLost, Refused

Message = TypeVar("Message")
END_S = 30.0
"""Longest wait for the process to end."""


class Process:
    """The parent's end. name: what it is called in messages. died: what became of it, once it is gone."""

    def __init__(self, name: str, connection: Connection, died: Callable[[], str]) -> None:
        self.name = name
        self._connection = connection
        self._died = died

    def send(self, message: msgspec.Struct) -> None:
        """Returns at once. Raises PeerLost."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError as error:
            raise PeerLost(f"the {self.name} process has died; {self._died()}") from error

    def receive(self, kind: type[Message], timeout_s: float) -> Message:
        """The next message. Raises Refused, as the process was, DeadlineExceeded, PeerLost."""
        try:
            if not self._connection.poll(timeout_s):
                raise DeadlineExceeded(f"the {self.name} process said nothing for {timeout_s:g} s")
            refused, said = msgspec.msgpack.decode(self._connection.recv_bytes(), type=tuple[str, msgspec.Raw])
        except (EOFError, OSError) as error:
            raise PeerLost(f"the {self.name} process has died; {self._died()}") from error
        if refused:
            raise Refused(refused)
        return msgspec.msgpack.decode(said, type=kind)


@contextmanager
def process(name: str, serve: Callable[[Connection, bytes], None], setup: msgspec.Struct) -> Iterator[Process]:
    """Start it; it ends with the context, by force after END_S, at once on Ctrl-C. Of the main thread.

    serve: what it does, given its end of the pipe and `setup` encoded, until the parent goes away.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(serve, theirs, msgspec.msgpack.encode(setup)), daemon=True)
    told = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: a terminal's Ctrl-C reaches both, the parent acts
    try:
        child.start()
    finally:
        signal.signal(signal.SIGINT, told)
    theirs.close()
    try:
        yield Process(name, ours, lambda: _end_of(child))
    except KeyboardInterrupt:
        child.kill()
        raise
    finally:
        ours.close()
        child.join(END_S)
        if child.is_alive():
            child.kill()
            child.join()
        child.close()


def say(connection: Connection, message: object, refused: str = "") -> None:
    """Answer the parent. refused: why there is no answer."""
    connection.send_bytes(msgspec.msgpack.encode((refused, message)))


def jobs(connection: Connection, kind: type[Message]) -> Iterator[Message]:
    """What the parent asks for, until it has gone."""
    while True:
        try:
            encoded = connection.recv_bytes()
        except EOFError:
            return
        yield msgspec.msgpack.decode(encoded, type=kind)


def _end_of(child: BaseProcess) -> str:
    """What to look for, of a process whose end of the pipe is closed."""
    child.join(END_S)
    if child.exitcode is None or child.exitcode >= 0:
        return "its own words are above"
    return f"it was killed by {signal.Signals(-child.exitcode).name}; if for want of memory, free some and run again"


def _child(serve: Callable[[Connection, bytes], None], connection: Connection, encoded: bytes) -> None:
    """The process. An error that has words for the user is said by the parent; if that has gone, nobody is told."""
    with suppress(ConnectionError):
        try:
            serve(connection, encoded)
        except LayercastError as error:
            say(connection, None, str(error))
