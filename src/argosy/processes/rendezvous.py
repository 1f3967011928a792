"""Where the members of a generation meet: torch's key-value store, in a process of its own on the first rank's node."""

from __future__ import annotations

from contextlib import suppress

from torch.distributed import TCPStore

from argosy.processes.channel import Gone
from argosy.processes.child import channel_to_parent


def main() -> None:
    """Open a store on a free port, say which, and keep it until the agent lets go of it."""
    agent = channel_to_parent()
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    with suppress(Gone):
        agent.send("store", port=store.port)
        agent.receive()
