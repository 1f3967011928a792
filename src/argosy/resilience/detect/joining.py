"""Processes that no world's detectors see yet: each is watched from its fork until its first step in a world.

The coordinator's detectors look at a world once all of its ranks have shown themselves; a single process that is
stopped before that would blind them to all others. So each agent looks after the processes that it forked until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from argosy.observe.heartbeat import HeartbeatReading
from argosy.processes.patience import STOPPED
from argosy.resilience.detect.hang import MAX_GAP_S, MIN_AUTO_S

OTHERS_S = 3.0
"""What is seen by the coordinator's detectors too is left to them for so much longer: they name the rank."""


@dataclass(frozen=True)
class Newcomer:
    """A process of this node, at one moment."""

    state: str
    """As in /proc/PID/stat: T is stopped."""
    generation: int
    """The generation whose world it was told to join last; 0: none."""
    reading: HeartbeatReading | None
    """None until it has a heartbeat."""

    @property
    def is_in_a_world(self) -> bool:
        """True once it has shown itself in the world that it was told to join."""
        return self.reading is not None and 0 < self.generation == self.reading.generation

    @property
    def has_stepped(self) -> bool:
        """True once it is in a step of that world: the detectors of the world see it from there on."""
        return self.is_in_a_world and self.reading is not None and self.reading.step >= 0


class JoiningWatch:
    """Watch the processes of one node that start, wait for a world, or join one."""

    def __init__(self, heartbeat_timeout_s: float, first_step_s: float):
        """Arguments as the keys of [resilience]."""
        self._heartbeat_timeout_s, self._first_step_s = heartbeat_timeout_s, first_step_s
        self._still: dict[int, _Still] = {}
        self._at_s = 0.0

    def look(self, at_s: float, newcomers: Mapping[int, Newcomer]) -> dict[int, str]:
        """Return why processes will not go on by themselves, by pid: the caller kills them.

        newcomers: all processes of the node that were forked, by pid. Only time in which the watcher itself ran counts.
        """
        passed_s = min(at_s - self._at_s, MAX_GAP_S) if self._at_s else 0.0
        self._at_s = at_s
        before, self._still = self._still, {}
        found: dict[int, str] = {}
        for pid, newcomer in newcomers.items():
            if newcomer.has_stepped:
                continue
            beats = -1 if newcomer.reading is None else newcomer.reading.beats
            still = before.get(pid, _Still(beats))
            self._still[pid] = still = _Still(beats, still.seconds + passed_s if still.beats == beats else 0.0)
            if still.seconds > self._patience_s(newcomer):
                found[pid] = _sentence(newcomer, still.seconds)
        return found

    def _patience_s(self, newcomer: Newcomer) -> float:
        """Return how long it may show no sign of life.

        A process that is not stopped may hold Python's lock for seconds while it imports or builds a model; before it
        has a heartbeat it may wait for a disk.
        """
        if newcomer.state in STOPPED:
            limit_s = self._heartbeat_timeout_s
        elif newcomer.reading is None:
            limit_s = max(self._heartbeat_timeout_s, self._first_step_s)
        else:
            limit_s = max(self._heartbeat_timeout_s, MIN_AUTO_S)
        return limit_s + OTHERS_S if newcomer.is_in_a_world else limit_s


@dataclass(frozen=True)
class _Still:
    """How long the number of beats has been the same."""

    beats: int
    seconds: float = 0.0


def _sentence(newcomer: Newcomer, still_s: float) -> str:
    how = "it was stopped" if newcomer.state in STOPPED else "it stands still"
    if newcomer.reading is None:
        return f"{how} while it started: no heartbeat in {still_s:.1f} s"
    doing = f"joined the world of generation {newcomer.generation}" if newcomer.generation else "waited for a world"
    return f"{how} while it {doing}: no heartbeat for {still_s:.1f} s"
