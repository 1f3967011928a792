"""The rendezvous store of a generation. It must not die with a worker.

On several nodes it is a process of an agent's. On one it is a file in the agent's folder, which only the user can open:
every user of the machine could read, fill and empty a store that listens on loopback.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from argosy.processes.channel import Channel, Gone
from argosy.processes.fork_server import RENDEZVOUS, STORE_HOST, ForkServer


def store_file(folder: Path, generation: int) -> Path:
    """Return the file at which the workers of a generation meet, if all are on the node with this folder."""
    return folder / f"store-{generation}"


class GenerationStore:
    """Holds the store of the newest generation that this node was asked for; none before."""

    def __init__(self, opened: Callable[[int, int | None], None], is_file: bool = False):
        """opened(generation, port): called once a store can be reached; the port is None if it is a file.

        is_file: True for a run on one node.
        """
        self._opened, self._is_file = opened, is_file
        self._channel: Channel | None = None
        self._generation = 0

    def open(self, generation: int, host: str, fork_server: ForkServer, selector: selectors.BaseSelector) -> None:
        """Start a store at `host`; a file is there without that.

        Each generation has a new one, so that no process finds the addresses of dead ones. selector: calls what its
        keys have as data, once there is something to hear.
        """
        if self._is_file:
            self._opened(generation, None)
            return
        self._selector = selector
        if self._channel is not None:
            with suppress(KeyError):
                selector.unregister(self._channel)
            self._channel.close()
        self._channel, self._generation = fork_server.fork("store", RENDEZVOUS, {STORE_HOST: host}), generation
        selector.register(self._channel, selectors.EVENT_READ, self._hear)

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

    def _hear(self) -> None:
        assert self._channel is not None
        try:
            messages = self._channel.take()
        except Gone:
            self._selector.unregister(self._channel)
            return
        for message in messages:
            self._opened(self._generation, message["port"])
