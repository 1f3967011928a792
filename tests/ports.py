"""Ports that tests choose for what is started later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

BELOW_EPHEMERAL = range(20000, 32000)
"""The kernel gives outgoing connections none of these, and Ray its workers those below: what was free when a test chose
it stays so."""
GIVEN: set[int] = set()
"""Ports that this process was told, which may not be open yet."""


def free_port() -> int:
    """Return a port of this machine that nobody has, another one each time."""
    for port in random.SystemRandom().sample(BELOW_EPHEMERAL, 100):
        if port not in GIVEN:
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):
                GIVEN.add(port)
                return port
    raise AssertionError("a hundred ports are all in use")
