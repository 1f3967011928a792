"""Waits are those between all pairs of ranks, though no pair is looked at."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from argosy.resilience.detect.finding import WorkerSeen
from argosy.resilience.detect.hang import HangDetector
from argosy.resilience.detect.sample import Sample
from argosy.resilience.detect.waits import Waits, blame

GROUPS = ["world#0", "mesh_tp#1", "mesh_dp#2", "mesh_pp#3"]
COUNTS = st.dictionaries(st.sampled_from(GROUPS), st.integers(0, 3))


def seen(counts: list[dict[str, int]]) -> dict[int, WorkerSeen]:
    return {rank: WorkerSeen(100 + rank, 3, "forward", of, "S", True) for rank, of in enumerate(counts)}


@given(st.lists(COUNTS, min_size=1, max_size=6))
def test_waits_are_those_between_all_pairs(counts):
    pairs = {
        (rank, other): [group for group in one if group in two and two[group] < one[group] and "pp" not in group]
        for rank, one in enumerate(counts)
        for other, two in enumerate(counts)
    }
    waits = Waits(seen(counts))
    assert waits.waiting == {rank for (rank, _), groups in pairs.items() if groups}
    assert waits.awaited == {other for (_, other), groups in pairs.items() if groups}
    for (rank, other), groups in pairs.items():
        assert (waits.group_of(rank, other) in groups) if groups else waits.group_of(rank, other) is None
        assert (rank in waits.waiting_for(other)) == bool(groups)
    left = set(waits.waiting)
    while left != (now := {other for (rank, other), groups in pairs.items() if groups and {rank, other} <= left}):
        left = now
    assert waits.circle() == left


def test_the_evidence_of_a_large_world_is_short():
    ranks = 4096
    counts = [{"world#0": 7 + rank % 2, "mesh_tp#1": 5} for rank in range(ranks)]
    detector, still = HangDetector(hang_s=5.0), np.zeros(ranks, dtype=bool)
    found = []
    for second in range(8):
        sample = Sample(float(second), 1, still | (second == 0), ~still, step=3, seen=seen(counts))
        found += detector.observe(sample)
    (finding,) = found
    assert finding.ranks == tuple(range(0, ranks, 2)), "all of them are killed"
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2040 others are stuck" in finding.why
    assert "2048 others wait in number 8" in finding.why and len(json.dumps(dict(finding.evidence))) < 10_000


def test_the_first_of_a_chain_is_to_blame_and_of_a_circle_the_odd_one():
    chain = seen([{"a": 1}, {"a": 2, "b": 1}, {"b": 2, "c": 1}, {"c": 2}])
    assert blame(chain)[:2] == ("hang", (0,))
    circle = seen([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 2, "b": 1}])
    assert blame(circle)[:2] == ("mismatch", (2,))
