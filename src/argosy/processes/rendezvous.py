"""The rendezvous store, in which the members of a world exchange addresses: torch's, in a process of its own."""

from __future__ import annotations

from contextlib import suppress

from torch.distributed import TCPStore

from argosy.processes.channel import Gone
from argosy.processes.child import channel_to_parent


def main() -> None:
    """Open a store on a free port, send the port to the asker, and end when the asker closes the channel."""
    asker = channel_to_parent()
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    with suppress(Gone):
        asker.send("store", port=store.port)
        asker.receive()
