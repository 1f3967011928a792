"""How many connections a process may have open: a shell's default, 1,024 files, is less than a large run needs."""

from __future__ import annotations

import resource
from contextlib import suppress

from argosy.errors import UserError

OTHERS = 64
"""What a coordinator has open besides a connection to each agent: log, events, planner, some that call."""


def raise_limit() -> None:
    """Let this process open as many files as the machine allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where there is no limit, macOS allows no number
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_descriptors(nodes: int) -> None:
    """Raises: UserError if a coordinator that is started here could not have a connection to each of so many nodes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nodes + OTHERS
    if most != resource.RLIM_INFINITY and most < needed:
        raise UserError(
            f"launch.nodes = {nodes}: the coordinator needs {needed} file descriptors, and this machine lets a process "
            f"have {most} (ulimit -Hn). Raise that (LimitNOFILE in systemd, nofile in /etc/security/limits.conf), or "
            "name another machine in launch.coordinator."
        )
