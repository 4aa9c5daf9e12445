"""Found by every Python process whose PYTHONPATH names this folder: it can reach loopback only, and each try is noted.

A process and its children write what they tried to reach to the file that BEYOND_LOOPBACK names; it is empty if all
went well. A refusal is an OSError, as that of a machine without a network is, so nobody has to expect it.
"""

import os
import sys
from pathlib import Path

LOOPBACK = ("127.", "::1", "localhost")
CALLS = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
"""Audit event to the place of its address or name."""
_note = Path(os.environ["BEYOND_LOOPBACK"])
_note.touch()


def _guard(event, args):
    if event not in CALLS:
        return
    address = args[CALLS[event]]
    host = address[0] if isinstance(address, tuple) else address
    if isinstance(address, (str, bytes)) and event in ("socket.connect", "socket.sendto"):
        return  # a socket in the file system
    if host is None or str(host).startswith(LOOPBACK):
        return
    with _note.open("a") as note:
        note.write(f"{event} {host}\n")
    raise OSError(f"{event}: {host} lies beyond loopback")


sys.addaudithook(_guard)
