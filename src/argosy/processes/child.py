"""Child processes: modules of Argosy that are started in a Python of their own, each with a channel to its parent.

A child is started, not forked: a fork of a process with threads may hang. It is not started through `multiprocessing`,
which would import the caller's `__main__`, and torch with it. Processes that need torch at once come from one child
that has imported it, `fork_server`.

A message on a channel is one line of JSON, over a pair of sockets that nobody else has. It may carry data beside its
JSON: byte strings, which follow the line as they are. It may carry open file descriptors as well. What processes of
different machines say to each other goes over a `connection`.

`Patience` waits for a process of this machine: one that was stopped, or takes too long, holds up nobody.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

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


# ---- in the parent --------------------------------------------------------------------------------------------------

CHANNEL, PARENT = "ARGOSY_CHANNEL", "ARGOSY_PARENT"
"""Environment variables of a child: the descriptor of its end of the channel, and the parent's process."""
PARENT_S = 0.5
"""Time until the parent's death is noticed if a process that it forked still holds its end of the channel."""
KILL_WAIT_S = 1.0
"""Time that a killed child is waited for. In a system call that hangs, on a disk say, it ends later or never."""
STDERR = 2


@dataclass(frozen=True)
class ForkEntry:
    """The function that a forked process calls, by name: the client need not be able to import it.

    A test resolves every entry of the package.
    """

    module: str
    function: str = "main"

    @classmethod
    def of(cls, function: Callable[[], None]) -> Self:
        """Return the entry of a function of a module."""
        return cls(function.__module__, function.__name__)

    def resolve(self) -> Callable[[], None]:
        function: Callable[[], None] = getattr(importlib.import_module(self.module), self.function)
        return function


def end_in_words(exit_code: int) -> str:
    """Return how a process ended. exit_code: negative for a signal."""
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


class Child:
    """A process that runs `python -m MODULE ARGUMENTS`, and the channel to it."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = STDERR,
        stderr: IO[bytes] | int | None = None,
    ):
        """Return at once, while the child imports its module.

        pass_fds: descriptors that it inherits under the same numbers, beside the channel's.
        environment: added to this process's own.
        stdout, stderr: as of subprocess.Popen. What a child prints goes to stderr: stdout may be this one's answer.

        Raises: OSError if there can be no more processes.
        """
        ours, theirs = socket.socketpair()
        paths = {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        ties = {CHANNEL: str(theirs.fileno()), PARENT: str(os.getpid())}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[theirs.fileno(), *pass_fds],
                env={**os.environ, **paths, **(environment or {}), **ties},
                start_new_session=True,  # a terminal's Ctrl-C does not reach it: this process decides what it means
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative if a signal ended it; None until `kill` or `reap` has seen it end."""
        return self._process.returncode

    def hear(self, timeout_s: float) -> list[Message]:
        """Return what it has said; wait for that up to `timeout_s`.

        Raises: ChannelClosed once it has closed its end.
        """
        if self.channel.fileno() >= 0:
            self.channel.wait(timeout_s)
        return self.channel.take()

    def kill(self) -> None:
        """End it with SIGKILL, and wait for that up to `KILL_WAIT_S`."""
        self._process.kill()
        self._wait()

    def reap(self) -> str:
        """Say how it ended. Call this once its channel is closed; if it has not ended within `KILL_WAIT_S`, kill it."""
        if not self._wait():
            self.kill()
        return "it cannot be ended" if self.exit_code is None else end_in_words(self.exit_code)

    def _wait(self) -> bool:
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_WAIT_S)
        return self._process.returncode is not None


# ---- in the child -----------------------------------------------------------------------------------------------


def channel_to_parent(send_timeout_s: float = SEND_TIMEOUT_S) -> Channel:
    """Return this process's end of the channel to the process that started it, or had it forked.

    For the beginning of `main`: what has been imported by then is left out of all garbage collections.
    """
    gc.freeze()  # that of the end alone would take a fifth of what the imports took
    descriptor = int(os.environ.pop(CHANNEL))
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor), send_timeout_s)


def messages(channel: Channel) -> Iterator[Message]:
    """Yield what the parent says, until it has closed its end or has died."""
    parent = int(os.environ.get(PARENT, "0"))
    with suppress(ChannelClosed):
        while not parent or os.getppid() == parent:
            if channel.wait(PARENT_S):
                yield from channel.take()


def end_with_parent(
    channel: Channel, is_over: threading.Event | None = None, is_gone: threading.Event | None = None
) -> None:
    """Have a thread end this process as soon as its parent has closed its end or has died. For a parent that says
    nothing any more but "finish", which sets `is_over`. With `is_gone`, the process is not ended: both are set.
    """

    def wait() -> None:
        for message in messages(channel):
            if is_over is not None and message["kind"] == "finish":
                is_over.set()
        if is_over is None or is_gone is None:
            os._exit(1)
        is_gone.set()
        is_over.set()

    threading.Thread(target=wait, name="argosy-parent", daemon=True).start()


PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that comes when the parent ends. It outlives exec."""
TIED_TO = "ARGOSY_TIED_TO"
"""Environment variable of a command that is to stop when the process that has started it ends: its number."""


def is_tied(parent: int, number: int) -> bool:
    """Have this process get a signal when its parent ends (on Linux). Return False if `parent` has ended already."""
    if sys.platform == "linux":
        import ctypes  # which few processes need

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def tie_to_starter() -> None:
    """Have this process stop, as by SIGTERM, when the one that `TIED_TO` names ends: it may be killed."""
    parent = os.environ.pop(TIED_TO, "")
    if parent and not is_tied(int(parent), signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)


STOPPED = ("T", "t")
"""States of a process that does nothing until it gets SIGCONT, or its debugger goes on."""
STOPPED_S = 10.0
"""Time that a process may be stopped while it is waited for."""
LONGEST_LOOK_S = 1.0
"""Looks that are further apart count as this far: the process that waits was stopped, or busy."""


def process_state(pid: int) -> str:
    """Return the state letter of a process of this machine, as in /proc/PID/stat; empty if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]  # the name before it may have brackets and spaces


class Patience:
    """Counts the time for which one process is waited for. Only time in which this process itself ran counts."""

    def __init__(self, pid: int, limit_s: float = math.inf, stopped_s: float = STOPPED_S):
        """limit_s: how long it is waited for. stopped_s: how long, if it is stopped all that time."""
        self.pid, self._limit_s, self._stopped_limit_s = pid, limit_s, stopped_s
        self._waited_s = self._stopped_s = 0.0
        self._looked_s = time.monotonic()

    def answered(self) -> None:
        """Begin to wait anew: it has said something."""
        self._waited_s = 0.0

    def end(self) -> str:
        """Return why it is not to be waited for any longer; empty: it is. Call this every second or more often."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, LONGEST_LOOK_S), now_s
        self._waited_s += passed_s
        self._stopped_s = self._stopped_s + passed_s if process_state(self.pid) in STOPPED else 0.0
        if self._stopped_s > self._stopped_limit_s:
            return f"it was stopped for {self._stopped_s:.0f} s"
        if self._waited_s > self._limit_s:
            return f"it did not answer for {self._waited_s:.0f} s"
        return ""


def wait_until(condition: Callable[[], object], limit_s: float = math.inf, every_s: float = 0.02) -> bool:
    """Wait until `condition` holds; return False if it does not within `limit_s` in which this process itself ran."""
    waited_s, looked_s = 0.0, time.monotonic()
    while not condition():
        now_s = time.monotonic()
        waited_s, looked_s = waited_s + min(now_s - looked_s, LONGEST_LOOK_S), now_s
        if waited_s > limit_s:
            return False
        time.sleep(every_s)
    return True
