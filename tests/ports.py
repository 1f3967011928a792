"""Ports that tests choose for what is started later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

BELOW_EPHEMERAL = range(15000, 32000)
"""The kernel gives outgoing connections none of these: what was free when a test chose it stays so."""


def free_port() -> int:
    """Return a port of this machine that nobody has."""
    for port in random.SystemRandom().sample(BELOW_EPHEMERAL, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports are all in use")
