"""What an agent must see by itself: processes that are in no world yet, and a fork server that does not answer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from argosy.config.resilience import ResilienceConfig
from argosy.processes.fork_server import ForkServer
from argosy.resilience.detect.finding import process_state
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
        self, now_s: float, scratch: Path, processes: Collection[WorkerProcess], fork_server: ForkServer
    ) -> dict[int, str]:
        """Return why processes, by pid, will not go on by themselves: the caller kills them.

        The fork server is one of them if it owes an answer: a process that it was asked for, or how one ended.
        """
        if now_s - self._looked_s < LOOK_S:
            return {}
        self._looked_s = now_s
        seen = {p.pid: _seen(p, scratch) for p in processes if p.pid and p.state is not RankState.DONE}
        if fork_server.has_forked and any(not p.pid or p.is_ending for p in processes):
            seen[fork_server.pid] = Newcomer(process_state(fork_server.pid), 0, None)  # an answer takes milliseconds
        return self._watch.look(now_s, seen)


def _seen(process: WorkerProcess, scratch: Path) -> Newcomer:
    generation = process.generation if process.state is RankState.RUNNING else 0
    return Newcomer(process_state(process.pid), generation, process.reading(scratch))
