"""The other end of a connection between an agent and the coordinator, held by a test."""

from __future__ import annotations

import json
import selectors
import socket
import time
from typing import Any

from argosy.processes.connection import Connection
from argosy.processes.secret import Handshake

SECRET = b"the secret of the runs of these tests"


class PeerGone(Exception):
    """The connection has ended; the text says why."""


class Peer:
    """One end, driven by calls that wait. It is proven once the constructor returns."""

    def __init__(self, connected: socket.socket, handshake: Handshake):
        self.socket, self._selector = connected, selectors.DefaultSelector()
        self.connection = Connection(connected, handshake, self._selector, None)
        self._messages: list[dict[str, Any]] = []
        while not self.connection.is_proven:
            self._turn(10.0)

    def say(self, kind: str, **facts: Any) -> None:
        """Send a message, whether it is a right one or not."""
        self.connection.send(json.dumps({"kind": kind, **facts}).encode())

    def take(self) -> list[dict[str, Any]]:
        """What has come."""
        self._turn(0.0)
        taken, self._messages = self._messages, []
        return taken

    def receive(self) -> dict[str, Any]:
        """The next message. Raises: PeerGone; TimeoutError after 10 s."""
        end = time.monotonic() + 10
        while not self._messages:
            if time.monotonic() > end:
                raise TimeoutError
            self._turn(1.0)
        return self._messages.pop(0)

    def close(self) -> None:
        self.connection.close()
        self._selector.close()

    def _turn(self, timeout_s: float) -> None:
        if not self._messages and self.connection.problem:
            raise PeerGone(self.connection.problem)
        if self._selector.select(timeout_s):
            self._messages += [json.loads(frame) for frame in self.connection.take()]
