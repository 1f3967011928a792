"""A rank that the workers' own checks blamed, because replicas, gradients or reductions differ: its machine may be bad.

A worker shows in its heartbeat how often it was blamed (`Heartbeat.suspect`); what they found workers write as events.
"""

from __future__ import annotations

from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.sample import Sample


class SuspectDetector:
    """Watch the ranks of a world."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], int] = {}
        """Node and process -> how often it was blamed so far. Nodes give the same numbers to their processes."""

    def observe(self, sample: Sample) -> list[Finding]:
        """Return what is found in the newest sample."""
        found = []
        for rank, suspicion in sorted(sample.suspicions.items()):
            process, times = (suspicion.node, suspicion.pid), suspicion.times
            if times > self._known.get(process, 0):
                self._known[process] = times
                why = f"the state or results of rank {rank} are wrong, or suspect"
                evidence = {"times": times, "pid": suspicion.pid}
                found.append(Finding("suspect", "check_node", why, (rank,), evidence))
        return found
