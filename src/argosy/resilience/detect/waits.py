"""Which rank waits for which, in a world that stands still, and which ranks are at fault.

Ranks that are in one process group begin the same collectives in the same order. One that has begun fewer than another
is waited for. Nothing here looks at pairs of ranks: a world may have 16,384.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from argosy.observe.heartbeat import Phase
from argosy.resilience.detect.finding import WorkerSeen

POINT_TO_POINT = ("mesh_pp",)
"""Beginnings of the names of groups whose ranks do not all make the same calls."""
WAITING_PHASES: tuple[Phase, ...] = ("communication", "pipeline")
NAMED = 8
"""A sentence names this many ranks at most."""


class Waits:
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
        """Return the ranks that wait for `rank`."""
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


def blame(seen: Mapping[int, WorkerSeen]) -> tuple[str, tuple[int, ...], Waits]:
    """Return, for ranks that have all stopped, the kind of hang, the ranks at fault, and which rank waits for which."""
    waits = Waits(seen)
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
    names = ", ".join(map(str, ranks[:NAMED]))
    if len(ranks) > NAMED:
        return f"ranks {names} and {len(ranks) - NAMED} others are"
    return f"ranks {names} are" if len(ranks) > 1 else f"rank {names} is"


def _minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks with the rarest value; all ranks if no value is rarer than another."""
    counts = Counter(values.values())
    least = min(counts.values())
    return tuple(sorted(rank for rank, value in values.items() if counts[value] == least))


def _kind_of(phases: Iterable[Phase]) -> str:
    return "stuck_loader" if set(phases) == {"data"} else "hang"
