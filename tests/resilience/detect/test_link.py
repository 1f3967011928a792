"""A link that became slow is told of; slow ranks, slow machines and noise are not taken for one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.straggler import SlowLinkDetector
from resilience.detect.samples import World

STEP_S = 1.0


def run(
    steps: int,
    own: Callable[[int, int], float] = lambda rank, step: 1.0,
    waited: Callable[[int], float] = lambda step: 1.0,
    next_world: str = "",
    seed: int = 0,
) -> list[tuple[int, Finding]]:
    """(step, finding) of a world whose own work and waiting take 0.1 s and 0.05 s times what is given."""
    world, link, random_, took = World(4, tick_s=STEP_S), SlowLinkDetector(), random.Random(seed), {}
    found = []
    for step in range(steps):
        busy_s = {rank: 0.1 * random_.uniform(0.8, 1.2) * own(rank, step) for rank in range(4)}
        took[step] = max(busy_s.values()) + 0.05 * random_.uniform(0.8, 1.2) * waited(step)
        if step == 100 and next_world:
            world.change(range(4), generation=2, busy_s={})
        plan = next_world if step >= 100 and next_world else "dp_replicate=4"
        world.step(busy_s=busy_s)
        found += [(step, finding) for finding in link.observe(world.sampled(), took, plan)]
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("times", [4.0, 20.0])
def test_a_link_that_became_slow_is_told_of_once_and_by_how_much(times, seed):
    ((step, finding),) = run(300, waited=lambda step: times if step >= 100 else 1.0, seed=seed)
    assert 155 <= step <= 185, "when it has lasted for most of four windows"
    assert (finding.kind, finding.action, finding.ranks) == ("slow_link", "alarm", ())
    grown = 1 + (times - 1) * 0.05 / 0.165
    assert finding.evidence["factor"] == pytest.approx(grown, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_else_is_taken_for_one(seed):
    assert not run(600, seed=seed)
    assert not run(300, own=lambda rank, step: 6.0 if rank == 2 and step >= 100 else 1.0, seed=seed), "a slow rank"
    slow = lambda step: 2.0 if step >= 100 else 1.0  # noqa: E731
    assert not run(300, own=lambda rank, step: slow(step), waited=slow, seed=seed), "a busy machine"
    assert not run(300, waited=lambda step: 20.0 if 100 <= step < 140 else 1.0, seed=seed), "what passes"
    assert not run(600, waited=lambda step: 20.0 if step % 3 == 0 else 1.0, seed=seed), "a step of three"


@pytest.mark.parametrize(("plan", "found"), [("tp=4", 0), ("dp_replicate=4", 1)])
def test_a_new_world_is_compared_with_the_one_before_if_it_has_its_plan(plan, found):
    assert len(run(300, waited=lambda step: 20.0 if step >= 100 else 1.0, next_world=plan)) == found


def test_what_a_step_takes_is_known_after_a_window():
    world, link = World(2, tick_s=STEP_S), SlowLinkDetector()
    for step in range(30):
        world.step()
        link.observe(world.sampled(), dict.fromkeys(range(step + 1), 0.15), "")
        assert (link.step_s is None) == (step < 21), "two that warm up, and twenty"
    assert link.step_s == pytest.approx(0.15)
