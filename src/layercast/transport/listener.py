"""Accepts TCP connections, and hands on those that prove the secret.

Does not know what is said on a connection afterwards.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address

from layercast.errors import BadSetting, DeadlineExceeded, LayercastError
from layercast.transport.wire import greet, shut

_log = logging.getLogger("layercast.transport")
GREETING_S = 5.0
RETRY_S = 0.1
"""Pause after a connection that could not be accepted, for example for want of file descriptors."""
MAX_STRANGERS = 32
"""Connections at one time that have proved nothing yet; more are dropped at once."""


class Listener:
    """A listening socket and its thread, from construction to `close`."""

    def __init__(
        self, bind: str, port: int, secret: bytes, incarnation: str, accepted: Callable[[socket.socket, str], object]
    ) -> None:
        """`accepted(sock, incarnation of the peer)` is called on a thread of this listener. Raises BadSetting."""
        self._secret = secret
        self._incarnation = incarnation
        self._accepted = accepted
        self._lock = threading.Lock()
        self._greeting: dict[threading.Thread, socket.socket] = {}
        self._strangers: set[threading.Thread] = set()
        """Those of `_greeting` whose peer has proved nothing yet."""
        self._closing = threading.Event()
        try:
            self._sock = socket.create_server(
                (bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET, backlog=64
            )
        except OSError as error:
            raise BadSetting(f"can't listen on {bind} port {port}: {error}; port 0 takes any free one") from error
        self.port: int = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="layercast-net-accept", daemon=True)
        self._thread.start()

    def close(self, deadline: float) -> None:
        """Give the port back and end the threads. Raises DeadlineExceeded at `deadline` (time.monotonic)."""
        with self._lock:
            self._closing.set()
            greeting = dict(self._greeting)
        shut(self._sock)
        for sock in greeting.values():
            shut(sock)
        for thread in (self._thread, *greeting):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise DeadlineExceeded(f"{thread.name} is still busy")
        self._sock.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if not self._closing.wait(RETRY_S):
                    _log.error("a connection could not be accepted: %s", error)
                continue
            thread = threading.Thread(target=self._greet, args=(sock,), name="layercast-net-greet", daemon=True)
            with self._lock:
                welcome = not self._closing.is_set() and len(self._strangers) < MAX_STRANGERS
                if welcome:
                    self._greeting[thread] = sock
                    self._strangers.add(thread)
                    thread.start()
            if not welcome:
                _log.warning("a connection was refused: %d others have proved nothing yet", MAX_STRANGERS)
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        thread, deadline = threading.current_thread(), time.monotonic() + GREETING_S

        def proved() -> None:
            # Before the caller knows: one who calls again and again must not meet his own greetings as strangers.
            with self._lock:
                self._strangers.discard(thread)

        try:
            incarnation = greet(sock, self._secret, self._incarnation, calling=False, deadline=deadline, proved=proved)
            self._accepted(sock, incarnation)
        except LayercastError as error:
            _log.warning("a connection was refused: %s", error)
            sock.close()
        finally:
            with self._lock:
                self._strangers.discard(thread)
                del self._greeting[thread]


def advertised(bind: str, advertise: str | None) -> str:
    """The host that peers are told. A wildcard is never told, nor loopback where others may call.

    Raises BadSetting with advice.
    """
    if advertise is None:
        advertise = _own_address(bind) if _is(bind, "is_unspecified") else bind
    if _is(advertise, "is_unspecified"):
        raise BadSetting(f"advertise = {advertise!r} is no address that a peer can call; give this machine's own")
    if _is(advertise, "is_loopback") and not _is(bind, "is_loopback"):
        raise BadSetting(
            f"advertise = {advertise!r} with bind = {bind!r}: peers elsewhere would call themselves; "
            "give this machine's own address, or bind to loopback"
        )
    return advertise


def _own_address(bind: str) -> str:
    """The address that this machine uses towards others. Nothing is sent for it."""
    v6 = ":" in bind
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if v6 else "192.0.2.1", 9))  # addresses reserved for documentation
        except OSError as error:
            raise BadSetting(f"bind = {bind!r}: this machine has no route to others; set advertise") from error
        return str(probe.getsockname()[0])


def _is(host: str, quality: str) -> bool:
    """Whether the host is an address with that quality; a name is resolved by the peer, except localhost."""
    if host == "localhost":
        return quality == "is_loopback"
    try:
        return bool(getattr(ip_address(host), quality))
    except ValueError:
        return False
