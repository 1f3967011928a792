"""What tests have forked in place of a store's process. It imports no torch, which each of them would wait for."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from argosy.processes.child import channel_to_parent
from argosy.processes.fork_server import STORE_HOST


def stop_the_first_time() -> None:
    """ForkEntry: the host is a file, which the first process leaves before it stops."""
    client, flag = channel_to_parent(), Path(os.environ[STORE_HOST])
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    client.send("store", port=7)


def die() -> None:
    """ForkEntry."""
