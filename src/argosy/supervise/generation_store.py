"""The rendezvous store of a generation. It must not die with a worker.

On several nodes it is a process of an agent's. On one it is a file in the agent's folder, which only the user can open:
every user of the machine could read, fill and empty a store that listens on loopback.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from argosy.errors import RunFailed
from argosy.processes.child import STOPPED_S, Channel, ChannelClosed, Patience
from argosy.processes.fork_server import RENDEZVOUS, STORE_HOST, ForkServer
from argosy.processes.supervisor import RestartPolicy, Restarts

STORE = "store"
"""Prefix of the fork server's keys of stores."""
STORE_RESTARTS = RestartPolicy(most_failures=3)
"""After three processes in a row that open no store the run ends."""


def store_file(folder: Path, generation: int) -> Path:
    """Return the file at which the workers of a generation meet, if all are on the node with this folder."""
    return folder / f"store-{generation}"


class GenerationStore:
    """Holds the store of the newest generation that this node was asked for; none before."""

    def __init__(
        self,
        opened: Callable[[int, int | None], None],
        limit_s: float = math.inf,
        stopped_s: float = STOPPED_S,
        is_file: bool = False,
    ):
        """opened(generation, port): called once a store can be reached; the port is None if it is a file.

        limit_s, stopped_s: of the `Patience` with the process that opens it. is_file: True for a run on one node.
        """
        self._opened, self._limits_s, self._is_file = opened, (limit_s, stopped_s), is_file
        self._channel: Channel | None = None
        self._generation = 0
        self._asked = 0
        self._patience: Patience | None = None
        self.is_awaited = False
        """True while a store was asked for that is not open yet."""

    def open(self, generation: int, host: str, fork_server: ForkServer, selector: selectors.BaseSelector) -> None:
        """Start a store at `host`; a file is there without that.

        Each generation has a new one, so that no process finds the addresses of dead ones. selector: calls what its
        keys have as data, once there is something to hear.
        """
        if self._is_file:
            self._opened(generation, None)
            return
        self._selector, self._host, self._generation, self._restarts = (
            selector,
            host,
            generation,
            Restarts(STORE_RESTARTS),
        )
        self._ask(fork_server)

    def forked(self, key: str, pid: int) -> None:
        """Note that the process of a request whose key begins with `STORE` was forked."""
        if key == self._key:
            self._patience = Patience(pid, *self._limits_s)

    def keep(self, fork_server: ForkServer) -> str:
        """Ask for another process if the one that was asked for has died, or does not open its store. Call this often.

        Returns why, if so; empty if there is nothing to say. Raises: RunFailed if several in a row were in vain.
        """
        if not self.is_awaited:
            return ""
        why = "" if self._patience is None else self._patience.end()
        if why and self._patience is not None:
            with suppress(ProcessLookupError):
                os.kill(self._patience.pid, signal.SIGKILL)
        elif self._channel is None:
            why = "it died"
        if why and self._restarts.ended() is None:
            raise RunFailed(
                f"the rendezvous store could not be opened at {self._host}, {self._restarts.failures} times in a row "
                f"({why}); what its process printed says more. Try another launch.address."
            )
        if why:
            self._ask(fork_server)
        return why

    def end(self, generation: int, folder: Path) -> None:
        """Make every wait in the file of a generation raise, now and later.

        torch opens the file for each look, and waits for it if it is missing. A link to itself cannot be opened.
        """
        if self._is_file:
            path = store_file(folder, generation)
            link = path.with_suffix(".ended")
            link.symlink_to(path.name)
            link.replace(path)

    def close(self) -> None:
        """End the process that is the store."""
        if self._channel is not None:
            self._channel.close()

    @property
    def _key(self) -> str:
        return f"{STORE} {self._asked}"

    def _ask(self, fork_server: ForkServer) -> None:
        if self._channel is not None:
            with suppress(KeyError):
                self._selector.unregister(self._channel)
            self._channel.close()
        self._asked, self._patience, self.is_awaited = self._asked + 1, None, True
        self._channel = fork_server.fork(self._key, RENDEZVOUS, {STORE_HOST: self._host})
        self._selector.register(self._channel, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        assert self._channel is not None
        try:
            messages = self._channel.take()
        except ChannelClosed:
            self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None
            return
        for message in messages:
            self.is_awaited = False
            self._opened(self._generation, message["port"])
