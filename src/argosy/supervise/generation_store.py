"""The rendezvous store of a generation, in a process of the agent's: it must not die with a worker."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from contextlib import suppress

from argosy.processes.channel import Channel, Gone
from argosy.processes.fork_server import RENDEZVOUS, STORE_HOST, ForkServer


class GenerationStore:
    """Holds the store of the newest generation that this node was asked for; none before."""

    def __init__(self, opened: Callable[[int, int], None]):
        """opened(generation, port): called once a store can be reached."""
        self._opened = opened
        self._channel: Channel | None = None
        self._generation = 0

    def open(self, generation: int, host: str, fork_server: ForkServer, selector: selectors.BaseSelector) -> None:
        """Start a store at `host`. Each generation has a new one, so that no process finds the addresses of dead ones.

        selector: calls what its keys have as data, once there is something to hear.
        """
        self._selector = selector
        if self._channel is not None:
            with suppress(KeyError):
                selector.unregister(self._channel)
            self._channel.close()
        self._channel, self._generation = fork_server.fork("store", RENDEZVOUS, {STORE_HOST: host}), generation
        selector.register(self._channel, selectors.EVENT_READ, self._hear)

    def close(self) -> None:
        """End the store."""
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
