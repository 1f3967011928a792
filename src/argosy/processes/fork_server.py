"""Processes that are there in milliseconds: forked from one that has imported what they need.

Importing torch takes seconds, at a run's start and for every worker that takes a dead one's place. The fork server
imports it once and then only forks. It computes nothing itself and starts no thread, so that a fork of it is as good as
new.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from argosy.processes.channel import Channel, Gone, Message

CHANNEL = "ARGOSY_CHANNEL"
"""Environment variable of a forked process: the descriptor of its end of the conversation with who asked for it."""


class ForkServer:
    """The asker's side: `fork` asks for processes, `take` tells which were born and which have ended."""

    def __init__(self, imports: str):
        """`imports`: the module that its processes will need. Returns at once; births wait for the import."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "argosy.processes.fork_server", str(theirs.fileno()), imports]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket = ours
        self._channel = Channel(ours)
        self.is_fertile = False
        """Whether it has given birth to any process."""

    @property
    def pid(self) -> int:
        """Of the fork server itself."""
        return self._process.pid

    def fileno(self) -> int:
        """For selectors."""
        return self._channel.fileno()

    def fork(self, key: str, entry: str, environment: Mapping[str, str]) -> Channel:
        """Ask for a process that calls `entry`, MODULE:FUNCTION, with `environment` added to its own.

        Returns the asker's end of a channel to it; the other end is what `channel_to_parent` gives it. What becomes
        of the request is told by `take` under its `key`. Raises: Gone if the fork server is.
        """
        ours, theirs = socket.socketpair()
        request = json.dumps({"key": key, "entry": entry, "environment": dict(environment)}).encode() + b"\n"
        try:
            socket.send_fds(self._socket, [len(request).to_bytes(8, "little")], [theirs.fileno()])
            self._socket.sendall(request)
        except OSError as problem:
            ours.close()
            raise Gone(f"the fork server is gone: {problem}") from None
        finally:
            theirs.close()
        return Channel(ours)

    def take(self) -> list[Message]:
        """Births (kind, key, pid) and ends (kind, pid, exit_code) since the last call. Raises: Gone."""
        messages = self._channel.take()
        self.is_fertile = self.is_fertile or bool(messages)
        return messages

    def close(self) -> None:
        """End it; processes that it forked live on, or end with their channel."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


def channel_to_parent() -> Channel:
    """In a forked process: its conversation with who asked for it."""
    return Channel(socket.socket(fileno=int(os.environ[CHANNEL])))


def main() -> None:
    """`python -m argosy.processes.fork_server DESCRIPTOR MODULE`: serve until the asker is gone."""
    asker = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module(sys.argv[2])
    gc.collect()
    gc.freeze()  # what is here is here to stay: a collection in a child would copy all of its pages
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to all; the asker decides what they mean
    entry = _serve(asker)
    if entry is not None:
        _live(entry)


def _serve(asker: socket.socket) -> str | None:
    """Fork on request. Returns in the forked process, with its entry, and in the fork server once the asker is gone."""
    channel = Channel(asker)
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    with selectors.DefaultSelector() as selector:
        selector.register(asker, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(1 << 12)
                    with suppress(Gone):
                        _tell_the_ended(channel)
                    continue
                request = _request(asker)
                if request is None:
                    signal.set_wakeup_fd(-1)
                    return None
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (asker, woken, wake):
                        end.close()
                    os.environ |= request["environment"]
                    os.environ[CHANNEL] = str(request["descriptor"])
                    return str(request["entry"])
                os.close(request["descriptor"])
                with suppress(Gone):
                    channel.send("born", key=request["key"], pid=pid)


def _request(asker: socket.socket) -> dict[str, Any] | None:
    """The next request, with the descriptor that came with it; None if the asker is gone."""
    try:
        head, descriptors, _, _ = socket.recv_fds(asker, 8, 1)
        if len(head) < 8:
            return None
        line = b""
        while len(line) < int.from_bytes(head, "little"):
            line += asker.recv(int.from_bytes(head, "little") - len(line))
    except OSError:
        return None
    request: dict[str, Any] = json.loads(line)
    return {**request, "descriptor": descriptors[0]}


def _tell_the_ended(channel: Channel) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        channel.send("ended", pid=pid, exit_code=os.waitstatus_to_exitcode(status))


def _live(entry: str) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)()
    sys.exit(0)


if __name__ == "__main__":
    main()
