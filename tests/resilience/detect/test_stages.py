"""Layers are dealt anew where stages are of unlike speed for long, and noise, however it looks, deals nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from argosy.config.schema import RunConfig
from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.stages import MOST_WATCHED, UnevenStagesDetector
from resilience.detect.samples import World
from tiny import run_config

RUN = run_config(Path("no data"), model={"layers": 8, "vocab_size": 40}, resilience={"rebalance": True})
Speed = Callable[[int, int, random.Random], float]
"""Rank, step and chance -> seconds for a layer."""


def found(
    speed: Speed, steps: int = 60, plan: str = "pp=2,layers=4:4", layers: tuple[int, ...] = (4, 4), run: RunConfig = RUN
) -> list[tuple[int, Finding]]:
    """(step, finding) of a world of one rank for each stage, with so many layers, and four microbatches a step."""
    world, detector, chance = World(len(layers), tick_s=1.0), UnevenStagesDetector(run), random.Random(1)
    told = []
    for step in range(steps):
        busy_s = {rank: 4 * n * speed(rank, step, chance) for rank, n in enumerate(layers)}
        world.step(busy_s=busy_s, microbatches=dict.fromkeys(busy_s, 4))
        told += [(step, finding) for finding in detector.observe(world.sampled(), plan)]
    return told


def test_a_slow_stage_is_to_have_fewer_layers_once_a_window_has_shown_it():
    (first, finding), *later = found(lambda rank, step, chance: 0.3 if rank else 0.1)
    assert 20 <= first < 25 and finding.kind == "uneven_stages" and not finding.ranks
    assert finding.evidence["layers"] == "4:4" and finding.evidence["microbatches"] == 4
    assert finding.evidence["stage_s"] == pytest.approx([0.4, 1.2]) and "layers 6:2" in finding.why
    assert all(step > 2 * first for step, _ in later), "and then it is watched twice as long"


@pytest.mark.parametrize(
    "noise",
    [
        lambda rank, step, chance: chance.uniform(0.7, 1.3),
        lambda rank, step, chance: chance.lognormvariate(0, 0.5),
        lambda rank, step, chance: chance.paretovariate(1.2),
        lambda rank, step, chance: 50.0 if chance.random() < 0.2 else 1.0,
        lambda rank, step, chance: 3.0 if rank == step // 5 % 4 else 1.0,
        lambda rank, step, chance: 1.12 if rank else 1.0,
    ],
    ids=["uniform", "lognormal", "pareto", "spikes", "in turns", "a little slow"],
)
@pytest.mark.parametrize("layers", [(4, 4), (2, 2, 2, 2)])
def test_stages_that_are_alike_stay(noise, layers):
    said = ":".join(map(str, layers))
    assert not found(noise, 2000, f"pp={len(layers)},layers={said}", layers)


def test_layers_that_fit_the_speed_stay():
    assert not found(lambda rank, step, chance: 0.3 if rank else 0.1, 200, "pp=2,layers=6:2", (6, 2))


def test_a_stage_that_was_slow_for_a_while_keeps_its_layers():
    assert not found(lambda rank, step, chance: 5.0 if rank and step < 12 else 1.0, 200)


def test_other_plans_are_left_alone():
    slow = lambda rank, step, chance: 5.0 if rank else 1.0  # noqa: E731
    for plan in ("dp_replicate=2", "pp=4", ""):
        assert not found(slow, 100, plan)


def test_what_does_not_pay_is_asked_for_ever_more_seldom():
    steps = [step for step, _ in found(lambda rank, step, chance: 0.3 if rank else 0.1, 1500)]
    assert [b - a for a, b in pairwise(steps)] == [min(2 * 2**n, MOST_WATCHED) * 20 for n in range(len(steps) - 1)]
    assert len(steps) >= 6
