"""What joins the processes of a world, and how to break it off, so that no process waits for a dead peer.

Collectives on GPUs wait inside kernels, over NVLink or InfiniBand, where no socket is that could be shut: their process
groups are aborted (`ProcessGroup.abort`, ncclCommAbort), which ends the kernels on this process's device. Those in host
memory wait for TCP connections, which are shut. torch's `shrink_group` is no substitute: all survivors call it together
once they have agreed on who is lost, and it keeps the layout of the rest; a new world may grow, or have another plan.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

ABORTED = frozenset({"nccl"})
"""Backends whose process groups are aborted. Not gloo's: that wakes nobody (see `break_off`), and shutting does."""


class Connections:
    """The connections that this process has opened since this object was made, in one world after the other."""

    def __init__(self, aborted: Collection[str] = ABORTED) -> None:
        self._others = frozenset(name for name, _ in _tcp_sockets())
        self._broken: dict[str, socket.socket] = {}
        self._backends, self._aborted = aborted, WeakSet[dist.ProcessGroup]()
        self._aborting: threading.Thread | None = None

    def break_off(self) -> None:
        """End all connections, so that a wait for a peer raises in any thread. May be called again for new ones.

        After an abort, a collective on a GPU returns, with numbers that mean nothing; the next one raises. Whoever uses
        such numbers asks first if the world is over.
        """
        self._abort_groups()
        self._shut_sockets()

    def _abort_groups(self) -> None:
        """Abort the process groups that wait on devices; in a thread, since an abort may itself take long."""
        if self._aborting is not None and self._aborting.is_alive():
            return
        groups = [group for group in _process_groups(self._backends) if group not in self._aborted]
        if groups:
            self._aborted.update(groups)
            self._aborting = threading.Thread(target=_abort, args=(groups,), name="argosy-abort", daemon=True)
            self._aborting.start()

    def _shut_sockets(self) -> None:
        """Shut the connections for reading.

        A gloo collective that waits for a stopped or unreachable peer ends only by its timeout: torch 2.13's
        ProcessGroup.abort does not wake it. The end of its connection does, but it does not wake a sender whose message
        could not be sent at once (gloo's Pair::signalException passes it over). So connections are shut for reading
        only, and kept open: a message to a peer that breaks off too is sent, though no process reads it.
        """
        for name, copy in _tcp_sockets():
            # Listening sockets stay: gloo's thread takes their end for its own mistake, and aborts the process.
            is_listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not (is_listening or name in self._others or name in self._broken):
                with suppress(OSError):  # not connected
                    copy.shutdown(socket.SHUT_RD)
                    self._broken[name] = copy.dup()

    def close(self) -> None:
        """Close the connections that were broken off, once all processes have left the world."""
        for connection in self._broken.values():
            connection.close()
        self._broken.clear()


def _process_groups(backends: Collection[str]) -> list[dist.ProcessGroup]:
    """Return the process groups of these backends, the newest first. torch has no public name for all groups."""
    names = dict(dist.distributed_c10d._world.pg_names)
    newest_first = sorted(names, key=lambda group: int(names[group]) if names[group].isdigit() else 0, reverse=True)
    found = []
    for group in newest_first:
        with suppress(ValueError, RuntimeError):  # it is being made, or destroyed
            if dist.get_backend(group) in backends:
                found.append(group)
    return found


def _abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort `groups` as one: NCCL's aborts of several communicators may wait for each other (pytorch issue 119797)."""
    together = next((some for some in map(_nccl, groups) if some is not None), None)
    if together is not None:
        together._group_start()
    for group in groups:
        with suppress(RuntimeError):  # it has failed already
            group.abort()
    if together is not None:
        together._group_end()


def _nccl(group: dist.ProcessGroup) -> Any:
    """Return NCCL's part of `group`, which can abort several as one; None if it has none."""
    if not dist.is_nccl_available() or dist.get_backend(group) != "nccl":
        return None
    with suppress(RuntimeError):
        return group._get_backend(torch.device("cuda"))
    return None


def _tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield this process's sockets with the kernel's names, e.g. "socket:[4711]"; each a copy, closed after use."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(entry.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        yield name, copy
