"""Messages between the processes that hold a run: one line of JSON each, over a socket of their own."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
Address = tuple[str, int]
"""Host and TCP port."""
SEND_TIMEOUT_S = 5.0
"""A peer that takes nothing for so long is as good as gone."""
CALL_TIMEOUT_S = 1.0


class Gone(Exception):
    """The other end is closed, or takes nothing any more."""


class Channel:
    """One end of a conversation. `take` never waits; `receive` does."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._reader = connection.dup()
        self._unread = b""

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, kind: str, **facts: Any) -> None:
        """Say something. Raises: Gone, as does whatever follows then: half of a message may have been sent."""
        try:
            self._socket.sendall(json.dumps({"kind": kind, **facts}).encode() + b"\n")
        except OSError as problem:
            self._shut()
            raise Gone(str(problem)) from None

    def take(self) -> list[Message]:
        """What has been said since; nothing, if nothing. Raises: Gone once the other end has closed."""
        messages: list[Message] = []
        while True:
            try:
                data = self._recv(timeout_s=0.0)
            except (BlockingIOError, InterruptedError):
                return messages
            except OSError as problem:
                data, why = b"", str(problem)
            else:
                why = "the other end has closed"
            if not data:
                if messages:
                    return messages  # the next call says that it is gone
                raise Gone(why)
            messages += self._lines(data)

    def receive(self) -> Message:
        """The next message, whenever it comes. Raises: Gone."""
        while b"\n" not in self._unread:
            try:
                data = self._recv(timeout_s=None)
            except OSError as problem:
                raise Gone(str(problem)) from None
            if not data:
                raise Gone("the other end has closed")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return _parsed(line)

    def close(self) -> None:
        """End the conversation."""
        self._shut()  # whoever waits in `receive` is to hear of it
        self._socket.close()
        self._reader.close()

    def _shut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _recv(self, timeout_s: float | None) -> bytes:
        # A duplicate, as one thread may wait here while another sends, and the time-out is the object's.
        self._reader.settimeout(timeout_s)
        return self._reader.recv(1 << 16)

    def _lines(self, data: bytes) -> list[Message]:
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [_parsed(line) for line in lines]


def _parsed(line: bytes) -> Message:
    """Raises: Gone if it is no message: whoever is there, a web browser perhaps, there is nothing to say to it."""
    with suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict) and "kind" in message:
            return message
    raise Gone("what it says is no message")


def call(address: Address) -> Future[socket.socket]:
    """Connect to `address`, in a thread of its own: where there is no way, it takes long to learn even what a name
    means. The future has an OSError if nobody answers.
    """
    connected: Future[socket.socket] = Future()

    def connect() -> None:
        try:
            connected.set_result(tcp(socket.create_connection(address, CALL_TIMEOUT_S)))
        except OSError as problem:
            connected.set_exception(problem)

    threading.Thread(target=connect, name="argosy-call", daemon=True).start()
    return connected


def tcp(connection: socket.socket) -> socket.socket:
    """`connection`, set up for short messages that are wanted at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
