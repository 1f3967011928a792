"""A rank that the workers' own checks have blamed, of copies that differ, gradients or sums: is its machine to blame?

A worker shows how often that happened to it (`Heartbeat.doubt`); what was found is an event of its own, by the workers.
"""

from __future__ import annotations

from argosy.resilience.detect.finding import Finding, Sample


class SuspectDetector:
    """Watches the ranks of a world."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        """Process -> its doubts so far."""

    def observe(self, sample: Sample) -> list[Finding]:
        """What is found in the newest sample."""
        found = []
        for rank, seen in sorted(sample.workers.items()):
            doubts, pid = seen.reading.doubts, seen.reading.pid
            if doubts > self._known.get(pid, 0):
                self._known[pid] = doubts
                why = f"what rank {rank} holds or computes was found wrong, or in doubt"
                found.append(Finding("suspect", "check_node", why, (rank,), {"times": doubts, "pid": pid}))
        return found
