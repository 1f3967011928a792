"""A parameter server's port: free, or soon to be."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from argosy.config.address import interface_of
from argosy.errors import UserError

PORT_S = 120.0
"""A server whose command was killed saves its state, and then leaves the port: it is waited for so long."""
LOOK_S = 0.2


def wait_for_port(address: tuple[str, int], is_ending: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Wait until nobody listens at the address, which is this machine's, or `is_ending` returns True.

    Raises: UserError if it stays taken, or may not be taken.
    """
    host, port = address
    end_s = 0.0
    while (problem := _problem(interface_of(host), port)) and not is_ending():
        now = time.monotonic()
        if problem.errno != errno.EADDRINUSE or (end_s and now > end_s):
            raise UserError(f"sync.servers: cannot listen at port {port} ({problem.strerror}). Give another port.")
        if not end_s:
            end_s = now + PORT_S
            say(f" port {port} is in use; waiting for up to {PORT_S:.0f} s")
        time.sleep(LOOK_S)


def _problem(interface: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((interface, port))
        except OSError as problem:
            return problem
    return None
