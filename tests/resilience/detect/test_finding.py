"""A rank that the workers' own checks blame is named, once for each time."""

from __future__ import annotations

import numpy as np

from argosy.resilience.detect.finding import Sample, SuspectDetector, Suspicion
from resilience.detect.samples import World


def test_a_rank_is_named_once_for_each_time_that_it_was_blamed():
    world, suspect = World(3), SuspectDetector()
    assert not suspect.observe(world.sampled())
    world.change(2, suspicions=1)
    (finding,) = suspect.observe(world.sampled())
    assert (finding.kind, finding.action, finding.ranks) == ("suspect", "check_node", (2,))
    assert not suspect.observe(world.sampled())
    world.change((1, 2), suspicions=2)
    assert [f.ranks for f in suspect.observe(world.sampled())] == [(1,), (2,)]


def test_a_process_that_takes_its_place_is_not_blamed_for_it():
    world, suspect = World(2), SuspectDetector()
    world.change(1, suspicions=3)
    suspect.observe(world.sampled())
    world.change(0, generation=2)
    world.change(1, pid=999, suspicions=0, generation=2)
    assert not suspect.observe(world.sampled())


def test_processes_of_two_nodes_that_have_the_same_number_are_told_apart():
    suspect, none = SuspectDetector(), np.zeros(2, dtype=bool)
    for suspicions in ({0: Suspicion("a", 7, 1)}, {1: Suspicion("b", 7, 1)}):
        (finding,) = suspect.observe(Sample(0.0, 1, none, none, suspicions=suspicions))
        assert finding.ranks == tuple(suspicions)
