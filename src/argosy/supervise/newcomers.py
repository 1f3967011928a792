"""What an agent must see by itself: processes that are in no world yet, and a fork server that does not answer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from argosy.config.resilience import ResilienceConfig
from argosy.processes.fork_server import ForkServer
from argosy.processes.patience import STOPPED, process_state
from argosy.resilience.detect.joining import JoiningWatch, Newcomer
from argosy.supervise.nodes import RankState
from argosy.supervise.worker_process import WorkerProcess

LOOK_S = 0.5
"""How often the processes are looked at."""


class Newcomers:
    """Watch the processes of a node from their fork to their first step in a world."""

    def __init__(self, settings: ResilienceConfig):
        self._watch = JoiningWatch(settings.heartbeat_timeout_s, settings.first_step_s)
        self._looked_s = 0.0

    def look(
        self,
        now_s: float,
        scratch: Path,
        processes: Collection[WorkerProcess],
        fork_server: ForkServer,
        is_owed: bool = False,
    ) -> dict[int, str]:
        """Return why processes, by pid, will not go on by themselves: the caller kills them.

        The fork server is one of them if it owes an answer: a process that it was asked for, or how one ended.
        is_owed: it owes one beside those of `processes`.
        """
        if now_s - self._looked_s < LOOK_S:
            return {}
        self._looked_s = now_s
        seen = {p.pid: _seen(p, scratch) for p in processes if p.pid and p.state is not RankState.DONE}
        owes = is_owed or any(not p.pid or p.is_ending for p in processes)
        state = process_state(fork_server.pid)
        if owes and (fork_server.has_forked or state in STOPPED):  # before it has, it imports, however long that takes
            seen[fork_server.pid] = Newcomer(state, 0, None)
        return self._watch.look(now_s, seen)


def _seen(process: WorkerProcess, scratch: Path) -> Newcomer:
    generation = process.generation if process.state is RankState.RUNNING else 0
    return Newcomer(process_state(process.pid), generation, process.reading(scratch))
