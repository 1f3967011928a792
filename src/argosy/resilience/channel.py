"""Messages between the processes that hold a run: one line of JSON each, over a socket of their own."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
SEND_TIMEOUT_S = 5.0
"""A peer that takes nothing for so long is as good as gone."""


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
        """Say something. Raises: Gone."""
        try:
            self._socket.sendall(json.dumps({"kind": kind, **facts}).encode() + b"\n")
        except OSError as problem:
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
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """End the conversation."""
        with suppress(OSError):  # whoever waits in `receive` is to hear of it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.close()

    def _recv(self, timeout_s: float | None) -> bytes:
        # A duplicate, as one thread may wait here while another sends, and the time-out is the object's.
        self._reader.settimeout(timeout_s)
        return self._reader.recv(1 << 16)

    def _lines(self, data: bytes) -> list[Message]:
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]
