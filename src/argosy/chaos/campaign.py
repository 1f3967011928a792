"""A chaos campaign: start a run, watch it, kill or stop its processes, and start it again where a fault stops it.

Workers are found by their heartbeats, other processes in the process table.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from argosy.errors import Retryable
from argosy.observe.heartbeat import HeartbeatReading, read_heartbeat
from argosy.processes.child import process_state
from argosy.supervise.scratch import SCRATCH

CHAOS_TICK_S = 0.05
NO_TARGET_S = 1.0
"""A fault that finds no process for this long is left out: faults must not pile up until there is one again."""
MOST_STARTS = 50
"""Number of times that the command is given before a run that says "try again" each time is given up."""
FORK_SERVER = "argosy.processes.fork_server"


@dataclass(frozen=True)
class FaultKind:
    about: str
    weight: float
    """Weight with which it is drawn."""
    seen_as: tuple[str, ...]
    """Events that show that it was noticed."""
    breaks_world: bool
    """True if the run goes on in another generation after it."""


KINDS = {
    "kill": FaultKind("SIGKILL to a worker", 4, ("worker_died",), True),
    "stop": FaultKind("SIGSTOP to a worker, for good", 2, ("stopped", "killed", "worker_died"), True),
    "point": FaultKind(
        "SIGKILL at a fault point inside a worker", 4, ("worker_died", "save_failed", "writer_died"), True
    ),
    "writer": FaultKind("SIGKILL to a process that writes checkpoints", 1, ("save_failed", "writer_died"), False),
    "coordinator": FaultKind("SIGKILL to the coordinator", 1, ("coordinator_lost",), False),
    "fork_server": FaultKind(
        "SIGKILL to the process that workers are forked from", 0.5, ("fork_server_replaced",), True
    ),
    "term": FaultKind("SIGTERM to the launcher, then the same command again", 1, ("signal",), True),
    "launcher": FaultKind("SIGKILL to the launcher, then the same command again", 0.5, (), True),
}
"""Kinds of faults, by their names on the command line."""


@dataclass(frozen=True)
class PlannedFault:
    at_s: float
    """Seconds after the first step."""
    kind: str
    pick: float
    """A number in [0, 1) that selects one of the possible processes, or steps."""


@dataclass(frozen=True)
class FirstStep:
    """The first step that was finished in a generation."""

    generation: int
    step: int
    time_s: float


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected: the process, the wall time as in events, and the generation and step at that time."""

    fault: PlannedFault
    what: str
    pid: int
    time_s: float
    generation: int
    step: int


@dataclass
class Campaign:
    """A run with faults, from its first start to its end."""

    command: Sequence[str]
    run_dir: Path
    faults: Sequence[PlannedFault]
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = math.inf
    """A run that takes longer is killed, with exit code -SIGKILL."""
    injected: list[InjectedFault] = field(default_factory=list)
    starts: int = 0
    exit_code: int = 0
    began_s: float | None = None
    """Wall time of the first step, as in events."""
    ended_s: float = 0.0
    made: list[FirstStep] = field(default_factory=list)
    readings: dict[int, HeartbeatReading] = field(default_factory=dict)
    """Heartbeats of the workers there are, by process."""
    workers_seen: set[int] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    """Other processes of the run."""
    _first_step_at: float = 0.0

    def run(self) -> None:
        """Start the command, inject the faults, start it again after faults that stop it; until the run has ended."""
        left = [fault for fault in self.faults if fault.kind != "point"]
        give_up_at = time.monotonic() + self.limit_s
        launcher = self._start()
        self.exit_code = -signal.SIGKILL
        try:
            while time.monotonic() < give_up_at:
                time.sleep(CHAOS_TICK_S)
                self._watch(launcher)
                if (code := launcher.poll()) is not None:
                    if not self._goes_on(code):
                        break
                    launcher = self._start()
                elif left and self._is_due(left[0]):
                    is_injected = self._inject(left[0], launcher)
                    if is_injected or self._is_due(left[0], since_s=NO_TARGET_S):
                        left.pop(0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
            self.ended_s = time.time()

    def _is_due(self, fault: PlannedFault, since_s: float = 0.0) -> bool:
        return self.began_s is not None and time.monotonic() - self._first_step_at >= fault.at_s + since_s

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir.parent / f"{self.run_dir.name}.log").open("ab") as log:
            return subprocess.Popen(
                list(self.command), env=os.environ | self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def _goes_on(self, code: int) -> bool:
        """Return True if the command should be given again: a fault stopped it, or its exit code says so."""
        self.exit_code = code
        asked = code in (-signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM)
        return (asked or code == Retryable.exit_code) and self.starts < MOST_STARTS

    def _watch(self, launcher: subprocess.Popen[bytes]) -> None:
        """Read the workers' heartbeats, and note the first step of each generation."""
        self.readings = {}
        for path in SCRATCH.glob(f"argosy-{launcher.pid}-*/worker-*.heartbeat"):
            with suppress(ValueError, OSError):
                reading = read_heartbeat(path)
                if reading is not None:
                    self.readings[reading.pid] = reading
        self.pids.add(launcher.pid)
        self.workers_seen |= set(self.readings)
        if self.began_s is None and any(reading.step >= 0 for reading in self.readings.values()):
            self.began_s, self._first_step_at = time.time(), time.monotonic()
        for reading in self.readings.values():
            if reading.busy_s and all(made.generation != reading.generation for made in self.made):
                self.made.append(FirstStep(reading.generation, min(reading.busy_s), time.time()))

    def _inject(self, fault: PlannedFault, launcher: subprocess.Popen[bytes]) -> bool:
        """Inject a fault; return False if there is no process for it (yet)."""
        targets = sorted(_TARGETS[fault.kind](self, launcher.pid))
        if not targets or not self.readings:
            return False
        pid = targets[int(fault.pick * len(targets))]
        generation = max(reading.generation for reading in self.readings.values())
        step = max(reading.step for reading in self.readings.values())
        rank = self.readings[pid].rank if pid in self.readings else None
        what = KINDS[fault.kind].about + (f" (rank {rank})" if rank is not None else "")
        self.pids.add(pid)
        injected = InjectedFault(fault, what, pid, time.time(), generation, step)
        try:
            os.kill(pid, _SIGNALS.get(fault.kind, signal.SIGKILL))
        except ProcessLookupError:
            return False
        self.injected.append(injected)
        return True

    def workers(self) -> list[int]:
        """Return the workers that have a rank now."""
        return [pid for pid, r in self.readings.items() if r.rank >= 0 and r.phase != "waiting" and is_alive(pid)]


Targets = Callable[[Campaign, int], list[int]]
"""The campaign and its launcher's process -> the processes that a fault may strike."""


def _of_module(module: str) -> Targets:
    return lambda _, launcher: [pid for pid in descendants(launcher) if module in command_of(pid)]


_TARGETS: dict[str, Targets] = {
    "kill": lambda campaign, _: campaign.workers(),
    "stop": lambda campaign, _: campaign.workers(),
    "writer": _of_module("argosy.checkpoint.writer"),
    "coordinator": _of_module("argosy.supervise.coordinator"),
    "fork_server": lambda _, launcher: [pid for pid in children(launcher) if FORK_SERVER in command_of(pid)],
    "term": lambda _, launcher: [launcher],
    "launcher": lambda _, launcher: [launcher],
}
_SIGNALS = {"stop": signal.SIGSTOP, "term": signal.SIGTERM}


def descendants(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        more = children(todo.pop())
        found += more
        todo += more
    return found


def children(pid: int) -> list[int]:
    """Return the children of `pid`, whichever of its threads started them."""
    with suppress(OSError):
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return []


def command_of(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def is_alive(pid: int) -> bool:
    return process_state(pid) not in ("", "Z", "X")
