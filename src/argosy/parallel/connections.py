"""The TCP connections of a world of processes, and how to break them off, so that no process waits for a dead peer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class Connections:
    """The connections that this process has opened since this object was made, in one world after the other."""

    def __init__(self) -> None:
        self._others = frozenset(name for name, _ in _tcp_sockets())
        self._broken: dict[str, socket.socket] = {}

    def break_off(self) -> None:
        """End all connections, so that a wait for a peer raises in any thread. May be called again for new ones.

        A gloo collective that waits for a stopped or unreachable peer ends only by its timeout: torch 2.13's
        ProcessGroup.abort does not wake it. The end of its connection does, but it does not wake a sender whose message
        could not be sent at once (gloo's Pair::signalException passes it over). So connections are shut for reading
        only, and kept open: a message to a peer that breaks off too is sent, though no process reads it.
        """
        for name, copy in _tcp_sockets():
            # Listening sockets stay: gloo's thread takes their end for its own mistake, and aborts the process.
            is_listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not (is_listening or name in self._others or name in self._broken):
                with suppress(OSError):  # not connected
                    copy.shutdown(socket.SHUT_RD)
                    self._broken[name] = copy.dup()

    def close(self) -> None:
        """Close the connections that were broken off, once all processes have left the world."""
        for connection in self._broken.values():
            connection.close()
        self._broken.clear()


def _tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield this process's sockets with the kernel's names, e.g. "socket:[4711]"; each a copy, closed after use."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(entry.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        yield name, copy
