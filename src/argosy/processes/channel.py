"""Messages between a process and its children: one line of JSON each, over a pair of sockets that nobody else has.

A message may carry data beside its JSON: byte strings, which follow the line as they are. It may carry open file
descriptors as well. What processes of different machines say to each other goes over a `connection`.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
"""Its "kind" and facts; "data", a list of memoryviews, and "descriptors", a list of ints, if it carried any."""
Data = bytes | memoryview
SEND_TIMEOUT_S = 5.0
"""A peer that takes nothing for this long is treated as gone."""
CHANNEL_RECEIVE_BYTES = 1 << 16
INT = struct.Struct("i")
MOST_DESCRIPTORS = 4
"""Most file descriptors in one message."""
NO_MESSAGE = "it sent an invalid message"


class ChannelClosed(Exception):
    """The other end is closed, or takes nothing any more."""


class Channel:
    """One end of a conversation. `take` never waits; `receive` does. One thread may receive while another sends."""

    def __init__(self, connection: socket.socket, send_timeout_s: float = SEND_TIMEOUT_S):
        """`send_timeout_s`: how long the other end may take nothing before it is gone; math.inf: for ever."""
        self._socket = connection
        connection.setblocking(True)  # the flag is shared with threads that wait: `take` asks each call not to
        if not math.isinf(send_timeout_s):
            timeval = struct.pack("ll", int(send_timeout_s), int(send_timeout_s % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._unread = bytearray()
        self._head: Message | None = None
        """A message whose data has not all come."""
        self._messages: deque[Message] = deque()
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors; -1 after `close`."""
        return self._socket.fileno()

    def send(
        self, kind: str, /, *, data: Sequence[Data] | None = None, descriptors: Sequence[int] = (), **facts: Any
    ) -> None:
        """Send a message. Raises: ChannelClosed, as does every later call: half of a message may have been sent."""
        message: Message = {"kind": kind, **facts}
        if data is not None:
            message["data"] = [memoryview(part).nbytes for part in data]
        if descriptors:
            message["descriptors"] = len(descriptors)
        frame = b"".join([json.dumps(message).encode(), b"\n", *(data or ())])
        try:
            sent = socket.send_fds(self._socket, [frame], list(descriptors)) if descriptors else 0
            self._socket.sendall(memoryview(frame)[sent:])
        except OSError as problem:
            self._shut()
            raise ChannelClosed(str(problem)) from None

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to take, the end included, up to `timeout_s`. Return whether there is."""
        if self._messages:
            return True
        poll = select.poll()  # select() takes no descriptors from 1024 on, and a rank of a large world has more
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def take(self) -> list[Message]:
        """Return the messages that have come since; none, if there are none.

        Raises: ChannelClosed once the other end has closed and everything it sent was taken.
        """
        why = ""
        while not why:
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as problem:
                why = str(problem)
        if why and not self._messages:
            raise ChannelClosed(why)  # else the next call says so
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def receive(self) -> Message:
        """Return the next message, however long it takes to come. Raises: ChannelClosed."""
        while not self._messages:
            try:
                self._read()
            except OSError as problem:
                raise ChannelClosed(str(problem)) from None
        return self._messages.popleft()

    def close(self) -> None:
        """End the conversation."""
        self._shut()  # a thread that waits in `receive`, and the other end, notice it
        self.forget()

    def forget(self) -> None:
        """Close this process's end, without ending the conversation for other processes that hold this end too."""
        self._socket.close()
        for descriptor in (*self._descriptors, *(d for m in self._messages for d in m.get("descriptors", ()))):
            os.close(descriptor)
        self._descriptors.clear()
        self._messages.clear()

    def _shut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, flags: int = 0) -> None:
        """Receive more bytes.

        Raises: OSError, also if the other end has closed; ChannelClosed if they are no message.
        """
        # Not socket.recv_fds, which ignores its flags.
        data, carried, _, _ = self._socket.recvmsg(
            CHANNEL_RECEIVE_BYTES, socket.CMSG_LEN(MOST_DESCRIPTORS * INT.size), flags
        )
        for level, kind, packed in carried:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(number for (number,) in INT.iter_unpack(packed))
        if not data:
            raise ConnectionError("the other end has closed")
        self._unread += data
        while (message := self._next()) is not None:
            self._messages.append(message)

    def _next(self) -> Message | None:
        """Return the first of the unread bytes as a message, if it is all there.

        Raises: ChannelClosed if it is none.
        """
        if self._head is None:
            end = self._unread.find(b"\n")
            if end < 0:
                return None
            self._head = _parsed(self._cut(end + 1))
        message, sizes = self._head, self._head.get("data", [])
        if len(self._unread) < sum(sizes):
            return None
        self._head = None
        if sizes:
            message["data"] = [memoryview(self._cut(size)) for size in sizes]
        if "descriptors" in message:
            if message["descriptors"] > len(self._descriptors):
                raise ChannelClosed(NO_MESSAGE)  # they come with the line's first byte
            message["descriptors"] = [self._descriptors.popleft() for _ in range(message["descriptors"])]
        return message

    def _cut(self, size: int) -> bytearray:
        """Take the first `size` unread bytes."""
        first = self._unread[:size]
        del self._unread[:size]
        return first


def _parsed(line: bytearray) -> Message:
    """Return the message of a line. Raises: ChannelClosed if it is none."""
    with suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict) and "kind" in message and _counts(message):
            return message
    raise ChannelClosed(NO_MESSAGE)


def _counts(message: Message) -> bool:
    """Return True if the sizes of its data and the number of its descriptors, where it has any, are numbers."""
    sizes, descriptors = message.get("data", []), message.get("descriptors", 0)
    return isinstance(sizes, list) and all(type(n) is int and n >= 0 for n in (*sizes, descriptors))
