"""A rank that the workers' own checks blamed, because replicas, gradients or reductions differ: its machine may be bad.

A worker shows in its heartbeat how often it was blamed (`Heartbeat.suspect`); what they found workers write as events.
"""

from __future__ import annotations

from argosy.resilience.detect.finding import Finding, Sample


class SuspectDetector:
    """Watch the ranks of a world."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        """Process -> how often it was blamed so far."""

    def observe(self, sample: Sample) -> list[Finding]:
        """Return what is found in the newest sample."""
        found = []
        for rank, seen in sorted(sample.workers.items()):
            suspicions, pid = seen.reading.suspicions, seen.reading.pid
            if suspicions > self._known.get(pid, 0):
                self._known[pid] = suspicions
                why = f"the state or results of rank {rank} are wrong, or suspect"
                found.append(Finding("suspect", "check_node", why, (rank,), {"times": suspicions, "pid": pid}))
        return found
