"""The rendezvous store, in which the members of a world exchange addresses: torch's, in a process of its own."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from torch.distributed import TCPStore

from argosy.processes.channel import Gone
from argosy.processes.child import channel_to_parent
from argosy.processes.fork_server import STORE_HOST

BACKLOG = 4096
"""Members that connect at the same time."""


def main() -> None:
    """Open a store on a free port of `STORE_HOST`, send the port to the asker, and end when that closes the channel."""
    asker, host = channel_to_parent(), os.environ[STORE_HOST]
    with socket.create_server((host, 0), backlog=BACKLOG) as listener:
        port = listener.getsockname()[1]
        # The store closes the descriptor that it listens on.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))
    with suppress(Gone):
        asker.send("store", port=store.port)
        asker.receive()
