"""A run that hangs: which rank is the cause, and what the others wait for.

Two signs are watched. The *beat* of a process is written by a thread of its own: it stops when the process is stopped,
or when something holds Python's lock. *Progress* is anything else that changes in its heartbeat: step, phase, the
number of collectives that it has begun. The ranks of a run need each other, so all stop soon after one does, and how
long each has stopped says nothing about the cause. But a rank that has begun fewer collectives of a group than its
peers is waited for: following the waits to a rank that waits for none gives the cause. If the waits form a circle,
ranks have begun collectives in different orders.

Groups in which ranks send to single others (a pipeline's) have counts that differ by design, and are left out; a hang
between only two pipeline stages blames both.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping
from statistics import median
from typing import Any

from argosy.observe.heartbeat import HeartbeatReading, Phase
from argosy.resilience.detect.finding import Finding, Sample, WorkerSeen

MIN_AUTO_S = 30.0
AUTO_STEPS = 10.0
"""hang_s = 0 waits for this many median steps, and at least `MIN_AUTO_S`."""
MAX_GAP_S = 1.0
"""A longer time between two samples means that the watcher itself, or the whole machine, did not run."""
SHOWN = 8
"""How many blamed ranks, and others, the evidence shows: a world may have thousands."""
SETTLED_S = 1.0
"""All ranks must have stopped for this long before the waits between them are read."""
POINT_TO_POINT = ("mesh_pp",)
"""Beginnings of the names of groups whose ranks do not all make the same calls."""
SLOW_PHASES: tuple[Phase, ...] = ("starting", "recovering", "checkpoint", "finishing")
"""Phases that may take long by nature: reading state, compiling, a slow disk."""
WAITING_PHASES: tuple[Phase, ...] = ("communication", "pipeline")

Waits = dict[int, dict[int, str]]
"""Rank -> ranks that it waits for -> the group in which it waits."""


class HangDetector:
    """Watch all ranks of a world."""

    def __init__(self, hang_s: float = 0.0, heartbeat_timeout_s: float = 10.0, first_step_s: float = 600.0):
        """Arguments as the keys of [resilience]; `hang_s` = 0 is automatic."""
        self._hang_s, self._heartbeat_timeout_s, self._first_step_s = hang_s, heartbeat_timeout_s, first_step_s
        self._tracks: dict[int, _Track] = {}
        self._step_s: deque[float] = deque(maxlen=100)
        self._at_s = 0.0
        self._has_evaluated = False

    def observe(self, sample: Sample) -> list[Finding]:
        """Return what is found in the newest sample; a rank is blamed once until it makes progress again."""
        passed_s = min(sample.at_s - self._at_s, MAX_GAP_S)
        self._at_s = sample.at_s
        before = self._tracks
        self._tracks = {rank: self._track(rank, seen.reading) for rank, seen in sample.workers.items()}
        for rank, seen in sample.workers.items():
            track = self._tracks[rank]
            self._has_evaluated |= track.reading.phase == "evaluate" and seen.reading.phase != "evaluate"
            is_new = track is not before.get(rank)  # it is not known since when it is in this state
            self._step_s.extend(track.update(seen.reading, 0.0 if is_new else passed_s))
        without_beat = [
            rank
            for rank, seen in sample.workers.items()
            if self._tracks[rank].beat_still_s >= self._beat_patience_s(seen)
        ]
        if without_beat:  # whatever else stands still may well wait for these
            return list(self._without_beat(sample, without_beat))
        return self._without_progress(sample)

    def _beat_patience_s(self, seen: WorkerSeen) -> float:
        """Return how long a beat may stop: imports and the construction of a model hold Python's lock for seconds."""
        if seen.state != "T" and seen.reading.phase in SLOW_PHASES:
            return max(self._heartbeat_timeout_s, MIN_AUTO_S)
        return self._heartbeat_timeout_s

    def _track(self, rank: int, reading: HeartbeatReading) -> _Track:
        """Return the record of a rank, a new one for another process or another world."""
        track = self._tracks.get(rank)
        if track is None or (track.reading.pid, track.reading.generation) != (reading.pid, reading.generation):
            return _Track(reading)
        return track

    def _without_beat(self, sample: Sample, ranks: list[int]) -> Iterator[Finding]:
        for rank in ranks:
            seen, track = sample.workers[rank], self._tracks[rank]
            if track.is_blamed:
                continue
            track.is_blamed = True
            kind, how = _words_of_state(seen.state)
            still_s = round(track.beat_still_s, 2)
            yield Finding(
                kind,
                "kill",
                f"rank {rank} (process {seen.reading.pid}) {how}: no heartbeat for {still_s:.1f} s, in "
                f"{_place(seen.reading)}",
                (rank,),
                {"beat_still_s": still_s, "state": seen.state, **_facts(seen.reading)},
            )

    def _without_progress(self, sample: Sample) -> list[Finding]:
        readings = {rank: seen.reading for rank, seen in sample.workers.items()}
        if not readings or not _is_one_world(readings):
            return []
        if min(track.still_s for track in self._tracks.values()) < min(SETTLED_S, self._limit_s / 2):
            return []
        kind, ranks, waits = blame(readings)
        blamed = [self._tracks[rank] for rank in ranks]
        if any(track.is_blamed for track in blamed):
            return []
        if any(self._tracks[rank].still_s < self._patience_s(rank, readings[rank]) for rank in ranks):
            return []
        for track in blamed:
            track.is_blamed = True
        still_s = round(max(track.still_s for track in blamed), 2)
        shown = {*ranks[:SHOWN], *sorted(readings)[:SHOWN], *sorted(waits)[:SHOWN]}
        evidence = {
            "still_s": still_s,
            "limit_s": round(self._limit_s, 2),
            "waits": {str(rank): _groups_of(waits[rank], ranks) for rank in sorted(shown & waits.keys())},
            "ranks_seen": {str(rank): _facts(readings[rank]) for rank in sorted(shown)},
        }
        return [Finding(kind, "kill", _sentence(kind, ranks, readings, waits, still_s), ranks, evidence)]

    @property
    def _limit_s(self) -> float:
        if self._hang_s:
            return self._hang_s
        return max(MIN_AUTO_S, AUTO_STEPS * median(self._step_s)) if self._step_s else self._first_step_s

    def _patience_s(self, rank: int, reading: HeartbeatReading) -> float:
        """Return how long this rank may stay in its phase: a phase that is entered first may have to be compiled."""
        is_first = not reading.busy_s or (reading.phase == "evaluate" and not self._has_evaluated)
        slow = is_first or reading.phase in SLOW_PHASES
        return max(self._limit_s, self._first_step_s) if slow else self._limit_s


class _Track:
    """How long a rank has made no progress, counting only time in which the watcher ran."""

    def __init__(self, reading: HeartbeatReading) -> None:
        self.reading = reading
        self.still_s = self.beat_still_s = 0.0
        self.is_blamed = False
        self._since_step_s = 0.0

    def update(self, now: HeartbeatReading, passed_s: float) -> Iterator[float]:
        """Take in a reading of the same process; yield how long a step took, if one has ended."""
        before, self.reading = self.reading, now
        self.still_s = 0.0 if _progress(before) != _progress(now) else self.still_s + passed_s
        self.beat_still_s = 0.0 if before.beats != now.beats else self.beat_still_s + passed_s
        if not self.still_s and not self.beat_still_s:
            self.is_blamed = False
        self._since_step_s += passed_s
        if now.step > before.step:
            if before.step >= 0:
                yield self._since_step_s / (now.step - before.step)
            self._since_step_s = 0.0


def blame(readings: Mapping[int, HeartbeatReading]) -> tuple[str, tuple[int, ...], Waits]:
    """Return, for ranks that have all stopped, the kind of hang, the ranks at fault, and which rank waits for which."""
    waits = waits_between(readings)
    awaited = {other for others in waits.values() for other in others}
    if culprits := awaited - waits.keys():
        return _kind_of({readings[rank].phase for rank in culprits}), tuple(sorted(culprits)), waits
    if waits:
        circle = _circle(waits)
        odd = _minority({rank: tuple(sorted(readings[rank].sequences.items())) for rank in circle})
        return "mismatch", odd, waits
    idle = [rank for rank, reading in readings.items() if reading.phase not in WAITING_PHASES]
    if idle and len(idle) < len(readings):
        return _kind_of({readings[rank].phase for rank in idle}), tuple(sorted(idle)), waits
    places = {rank: (reading.step, reading.phase) for rank, reading in readings.items()}
    if len(set(places.values())) > 1:
        return "mismatch", _minority(places), waits
    return _kind_of({reading.phase for reading in readings.values()}), tuple(sorted(readings)), waits


def waits_between(readings: Mapping[int, HeartbeatReading]) -> Waits:
    """Return which rank waits for which: for those that have begun fewer collectives of a group that both are in."""
    begun: dict[str, dict[int, int]] = {}
    for rank, reading in readings.items():
        for group, number in reading.sequences.items():
            if not group.startswith(POINT_TO_POINT):
                begun.setdefault(group, {})[rank] = number
    waits: Waits = {}
    for group, numbers in begun.items():
        most = max(numbers.values())
        behind = [(rank, number) for rank, number in numbers.items() if number < most]
        for rank, number in numbers.items() if behind else ():
            for other, fewer in behind:
                if fewer < number:
                    waits.setdefault(rank, {}).setdefault(other, group)
    return waits


def _circle(waits: Waits) -> set[int]:
    """Return the ranks that wait for each other: what is left after removing, repeatedly, ranks that none waits for."""
    left = set(waits)
    while True:
        awaited = {other for rank in left for other in waits[rank]} & left
        if awaited == left:
            return left
        left = awaited


def _minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks with the rarest value; all ranks if no value is rarer than another."""
    counts = Counter(values.values())
    least = min(counts.values())
    return tuple(sorted(rank for rank, value in values.items() if counts[value] == least))


def _kind_of(phases: set[Phase]) -> str:
    return "stuck_loader" if phases == {"data"} else "hang"


def _is_one_world(readings: Mapping[int, HeartbeatReading]) -> bool:
    """True if all are in one generation and none waits for the next: forming a world is the coordinator's affair."""
    return len({r.generation for r in readings.values()}) == 1 and all(r.phase != "waiting" for r in readings.values())


def _progress(reading: HeartbeatReading) -> Hashable:
    return reading.step, reading.phase, reading.phase_since_ns, tuple(reading.sequences.items())


def _words_of_state(state: str) -> tuple[str, str]:
    if state in ("T", "t"):
        return "stopped", "was stopped"
    if state == "D":
        return "frozen", "waits in the kernel for a device"
    return "frozen", "holds Python's lock"


def _sentence(
    kind: str, ranks: tuple[int, ...], readings: Mapping[int, HeartbeatReading], waits: Waits, s: float
) -> str:
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    verb = "are" if len(ranks) > 1 else "is"
    first = readings[ranks[0]]
    if kind == "mismatch":
        return (
            f"{named} {verb} at another collective than the others ({_place(first)}), and all have waited for {s:.1f} s"
        )
    for rank, awaited in waits.items():
        if group := awaited.get(ranks[0]):
            begun, theirs = first.sequences[group], readings[rank].sequences[group]
            waiting = sum(ranks[0] in others for others in waits.values())
            others = "1 other waits" if waiting == 1 else f"{waiting} others wait"
            return (
                f"{named} {verb} stuck in {_place(first)} for {s:.1f} s: began {begun} collectives of {group}, and "
                f"{others} in number {theirs}"
            )
    return f"{named} {verb} stuck in {_place(first)} for {s:.1f} s"


def _groups_of(groups: Mapping[int, str], blamed: tuple[int, ...]) -> dict[str, str]:
    return {str(rank): groups[rank] for rank in blamed if rank in groups}


def _place(reading: HeartbeatReading) -> str:
    return f"{reading.phase} of step {reading.step}" if reading.step >= 0 else reading.phase


def _facts(reading: HeartbeatReading) -> dict[str, Any]:
    return {
        "pid": reading.pid,
        "generation": reading.generation,
        "step": reading.step,
        "phase": reading.phase,
        "sequences": dict(reading.sequences),
    }
