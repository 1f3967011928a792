"""A run that hangs: which rank is the cause, and what the others wait for.

Two signs are watched. The *beat* of a process is written by a thread of its own: it stops when the process is stopped,
or when something holds Python's lock. *Progress* is anything else that changes in its heartbeat: step, phase, the
number of collectives that it has begun. The ranks of a run need each other, so all stop soon after one does, and how
long each has stopped says nothing about the cause. But a rank that has begun fewer collectives of a group than its
peers is waited for: following the waits to a rank that waits for none gives the cause. If the waits form a circle,
ranks have begun collectives in different orders.

Groups in which ranks send to single others (a pipeline's) have counts that differ by design, and are left out; a hang
between only two pipeline stages blames both.

The coordinator looks at a world once all of its ranks have shown themselves; a single process that is stopped before
that would blind it to all others. So each agent watches the processes that it had forked until their first step in a
world (`JoiningWatch`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from argosy.errors import some_of
from argosy.observe.heartbeat import HeartbeatReading, Phase
from argosy.processes.child import STOPPED
from argosy.resilience.detect.finding import Finding, Flags, Sample, Times, WorkerSeen

POINT_TO_POINT = ("mesh_pp",)
"""Beginnings of the names of groups whose ranks do not all make the same calls."""
WAITING_PHASES: tuple[Phase, ...] = ("communication", "pipeline")
SENTENCE_RANKS = 8
"""A sentence names this many ranks at most."""


class RankWaits:
    """The waits of ranks for others."""

    def __init__(self, seen: Mapping[int, WorkerSeen]):
        self._begun: dict[str, dict[int, int]] = {}
        """Group -> rank -> number of collectives begun."""
        for rank, worker in seen.items():
            for group, number in worker.sequences.items():
                if not group.startswith(POINT_TO_POINT):
                    self._begun.setdefault(group, {})[rank] = number
        self.waiting: set[int] = set()
        """Ranks that wait for another."""
        self.awaited: set[int] = set()
        """Ranks that another waits for."""
        for numbers in self._begun.values():
            least, most = min(numbers.values()), max(numbers.values())
            self.waiting |= {rank for rank, number in numbers.items() if number > least}
            self.awaited |= {rank for rank, number in numbers.items() if number < most}

    def group_of(self, rank: int, other: int) -> str | None:
        """Return the first group in which `rank` waits for `other`; None if it does not."""
        for group, numbers in self._begun.items():
            if rank in numbers and other in numbers and numbers[other] < numbers[rank]:
                return group
        return None

    def group_in_which_awaited(self, rank: int) -> str | None:
        """Return the first group in which others wait for `rank`."""
        for group, numbers in self._begun.items():
            if rank in numbers and numbers[rank] < max(numbers.values()):
                return group
        return None

    def waiting_for(self, rank: int) -> set[int]:
        return {
            other
            for numbers in self._begun.values()
            if rank in numbers
            for other, number in numbers.items()
            if number > numbers[rank]
        }

    def next_after(self, rank: int, group: str) -> int:
        """Return the number of the collective in which the first of those waits that wait for `rank` in `group`."""
        numbers = self._begun[group]
        return next(number for number in numbers.values() if number > numbers[rank])

    def circle(self) -> set[int]:
        """Return the ranks that wait for each other: what is left once those that none waits for are removed, again and
        again."""
        left = self.waiting
        while True:
            awaited: set[int] = set()
            for numbers in self._begun.values():
                most = max((numbers[rank] for rank in numbers.keys() & left), default=0)
                awaited |= {rank for rank, number in numbers.items() if number < most and rank in left}
            if awaited == left:
                return left
            left = awaited


def blame(seen: Mapping[int, WorkerSeen]) -> tuple[str, tuple[int, ...], RankWaits]:
    """Return, for ranks that have all stopped, the kind of hang, the ranks at fault, and which rank waits for which."""
    waits = RankWaits(seen)
    if culprits := waits.awaited - waits.waiting:
        return _kind_of({seen[rank].phase for rank in culprits}), tuple(sorted(culprits)), waits
    if waits.waiting:
        odd = _minority({rank: tuple(sorted(seen[rank].sequences.items())) for rank in waits.circle()})
        return "mismatch", odd, waits
    idle = [rank for rank, worker in seen.items() if worker.phase not in WAITING_PHASES]
    if idle and len(idle) < len(seen):
        return _kind_of({seen[rank].phase for rank in idle}), tuple(sorted(idle)), waits
    places = {rank: (worker.step, worker.phase) for rank, worker in seen.items()}
    if len(set(places.values())) > 1:
        return "mismatch", _minority(places), waits
    return _kind_of({worker.phase for worker in seen.values()}), tuple(sorted(seen)), waits


def is_named(ranks: tuple[int, ...]) -> str:
    """Return the beginning of a sentence about these ranks."""
    names = some_of(ranks, SENTENCE_RANKS, "others")
    return f"ranks {names} are" if len(ranks) > 1 else f"rank {names} is"


def _minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks with the rarest value; all ranks if no value is rarer than another."""
    counts = Counter(values.values())
    least = min(counts.values())
    return tuple(sorted(rank for rank, value in values.items() if counts[value] == least))


def _kind_of(phases: Iterable[Phase]) -> str:
    return "stuck_loader" if set(phases) == {"data"} else "hang"


MIN_AUTO_S = 30.0
AUTO_STEPS = 10.0
"""hang_s = 0 waits for this many median steps, and at least `MIN_AUTO_S`."""
MAX_GAP_S = 1.0
MAX_GAP = 2.0
"""A time between two samples that is longer than both, this many times the usual one and so many seconds, means that
the watcher itself, or the whole machine, did not run."""
EVIDENCE_RANKS = 8
"""Number of blamed ranks, and of others, in the evidence: a world may have thousands."""
SETTLED_S = 1.0
"""All ranks must have stopped for this long before the waits between them are read."""
SLOW_PHASES: tuple[Phase, ...] = ("starting", "recovering", "checkpoint", "finishing")
"""Phases that may take long by nature: reading state, compiling, a slow disk."""


class HangDetector:
    """Watch all ranks of a world."""

    def __init__(self, hang_s: float = 0.0, heartbeat_timeout_s: float = 10.0, first_step_s: float = 600.0):
        """Arguments as the keys of [resilience]; `hang_s` = 0 is automatic."""
        self._hang_s, self._heartbeat_timeout_s, self._first_step_s = hang_s, heartbeat_timeout_s, first_step_s
        self._step_s: deque[float] = deque(maxlen=100)
        self._at_s = 0.0
        self._has_evaluated = False
        self._still_s: Times
        """Time for which each rank has made no progress, counting only time in which the watcher ran."""
        self._beat_still_s: Times
        """Time for which its heart has not beaten."""
        self._is_blamed: Flags
        self._start(-1, 0)

    @property
    def wants_all(self) -> bool:
        """True if samples should have all that all ranks show: a hang may soon have lasted long enough."""
        return self._have_stopped_for(self._limit_s / 2)

    def observe(self, sample: Sample) -> list[Finding]:
        """Return what is found in the newest sample; a rank is blamed once until it makes progress again."""
        passed_s = min(sample.at_s - self._at_s, max(MAX_GAP_S, MAX_GAP * sample.every_s))
        self._at_s = sample.at_s
        if (sample.generation, sample.size) != (self._generation, len(self._still_s)):
            self._start(sample.generation, sample.size)
            passed_s = 0.0  # it is not known since when they are in this state
        self._has_evaluated |= sample.has_evaluated
        self._still_s = np.where(sample.moved, 0.0, self._still_s + passed_s)
        self._beat_still_s = np.where(sample.beaten, 0.0, self._beat_still_s + passed_s)
        self._is_blamed &= (self._still_s > 0) | (self._beat_still_s > 0)
        self._time_steps(sample.step, passed_s)
        without_beat = self._ranks_without_beat(sample)
        if without_beat:  # whatever else stands still may well wait for these
            return list(self._without_beat(sample, without_beat))
        is_known = len(sample.seen) == sample.size
        return self._without_progress(sample) if is_known and self._have_stopped_for(self._limit_s) else []

    def _start(self, generation: int, ranks: int) -> None:
        self._generation = generation
        self._still_s, self._beat_still_s = np.zeros(ranks), np.zeros(ranks)
        self._is_blamed = np.zeros(ranks, dtype=np.bool_)
        self._step, self._since_step_s = -1, 0.0

    def _time_steps(self, step: int, passed_s: float) -> None:
        """Take in which step the world is in now."""
        self._since_step_s += passed_s
        if step > self._step:
            if self._step >= 0:
                self._step_s.append(self._since_step_s / (step - self._step))
            self._step, self._since_step_s = step, 0.0

    def _ranks_without_beat(self, sample: Sample) -> list[int]:
        late = np.flatnonzero(self._beat_still_s >= self._heartbeat_timeout_s).tolist()
        return [
            rank
            for rank in late
            if rank in sample.seen and self._beat_still_s[rank] >= self._beat_patience_s(sample.seen[rank])
        ]

    def _beat_patience_s(self, seen: WorkerSeen) -> float:
        """Return how long a beat may stop: imports and the construction of a model hold Python's lock for seconds."""
        if seen.state not in STOPPED and seen.phase in SLOW_PHASES:
            return max(self._heartbeat_timeout_s, MIN_AUTO_S)
        return self._heartbeat_timeout_s

    def _without_beat(self, sample: Sample, ranks: list[int]) -> Iterator[Finding]:
        for rank in ranks:
            if self._is_blamed[rank]:
                continue
            self._is_blamed[rank] = True
            seen = sample.seen[rank]
            kind, how = _words_of_state(seen.state)
            still_s = round(float(self._beat_still_s[rank]), 2)
            yield Finding(
                kind,
                "kill",
                f"rank {rank} (process {seen.pid}) {how}: no heartbeat for {still_s:.1f} s, in {_place(seen)}",
                (rank,),
                {"beat_still_s": still_s, "state": seen.state, **_facts(seen, sample.generation)},
            )

    def _without_progress(self, sample: Sample) -> list[Finding]:
        seen = sample.seen
        if any(worker.phase == "waiting" for worker in seen.values()):
            return []  # forming a world is the coordinator's affair
        kind, ranks, waits = blame(seen)
        blamed = list(ranks)
        if self._is_blamed[blamed].any():
            return []
        if any(self._still_s[rank] < self._patience_s(seen[rank]) for rank in ranks):
            return []
        self._is_blamed[blamed] = True
        still_s = round(float(self._still_s[blamed].max()), 2)
        shown = {*ranks[:EVIDENCE_RANKS], *sorted(seen)[:EVIDENCE_RANKS], *sorted(waits.waiting)[:EVIDENCE_RANKS]}
        evidence = {
            "still_s": still_s,
            "limit_s": round(self._limit_s, 2),
            "waits": {
                str(rank): {
                    str(other): group for other in ranks[:EVIDENCE_RANKS] if (group := waits.group_of(rank, other))
                }
                for rank in sorted(shown & waits.waiting)
            },
            "ranks_seen": {str(rank): _facts(seen[rank], sample.generation) for rank in sorted(shown)},
        }
        return [Finding(kind, "kill", _sentence(kind, ranks, seen, waits, still_s), ranks, evidence)]

    def _have_stopped_for(self, seconds: float) -> bool:
        """Return True if no rank makes progress any more, and one has not for so long."""
        if not len(self._still_s) or self._still_s.max() < seconds:
            return False
        return bool(self._still_s.min() >= min(SETTLED_S, self._limit_s / 2))

    @property
    def _limit_s(self) -> float:
        if self._hang_s:
            return self._hang_s
        return max(MIN_AUTO_S, AUTO_STEPS * median(self._step_s)) if self._step_s else self._first_step_s

    def _patience_s(self, seen: WorkerSeen) -> float:
        """Return how long a rank may stay in its phase: a phase that is entered first may have to be compiled."""
        is_first = not seen.has_made_a_step or (seen.phase == "evaluate" and not self._has_evaluated)
        slow = is_first or seen.phase in SLOW_PHASES
        return max(self._limit_s, self._first_step_s) if slow else self._limit_s


def _words_of_state(state: str) -> tuple[str, str]:
    if state in STOPPED:
        return "stopped", "was stopped"
    if state == "D":
        return "frozen", "waits in the kernel for a device"
    return "frozen", "holds Python's lock"


def _sentence(kind: str, ranks: tuple[int, ...], seen: Mapping[int, WorkerSeen], waits: RankWaits, s: float) -> str:
    named = is_named(ranks)
    first = seen[ranks[0]]
    if kind == "mismatch":
        return f"{named} at another collective than the others ({_place(first)}), and all have waited for {s:.1f} s"
    stuck = f"{named} stuck in {_place(first)} for {s:.1f} s"
    group = waits.group_in_which_awaited(ranks[0])
    if group is None:
        return stuck
    waiting = len(waits.waiting_for(ranks[0]))
    others = "1 other waits" if waiting == 1 else f"{waiting} others wait"
    begun, theirs = first.sequences[group], waits.next_after(ranks[0], group)
    return f"{stuck}: began {begun} collectives of {group}, and {others} in number {theirs}"


def _place(seen: WorkerSeen) -> str:
    return f"{seen.phase} of step {seen.step}" if seen.step >= 0 else seen.phase


def _facts(seen: WorkerSeen, generation: int) -> dict[str, Any]:
    return {
        "pid": seen.pid,
        "generation": generation,
        "step": seen.step,
        "phase": seen.phase,
        "sequences": dict(seen.sequences),
    }


COORDINATOR_FIRST_S = 3.0
"""Time for which the coordinator's detectors, which name the rank, come first."""


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
                found[pid] = _sentence_of_newcomer(newcomer, still.seconds)
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
        return limit_s + COORDINATOR_FIRST_S if newcomer.is_in_a_world else limit_s


@dataclass(frozen=True)
class _Still:
    """Time for which the number of beats has been the same."""

    beats: int
    seconds: float = 0.0


def _sentence_of_newcomer(newcomer: Newcomer, still_s: float) -> str:
    how = "it was stopped" if newcomer.state in STOPPED else "it stands still"
    if newcomer.reading is None:
        return f"{how} while it started: no heartbeat in {still_s:.1f} s"
    doing = f"joined the world of generation {newcomer.generation}" if newcomer.generation else "waited for a world"
    return f"{how} while it {doing}: no heartbeat for {still_s:.1f} s"
