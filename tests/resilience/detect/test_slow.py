"""Slow ranks are named within the window; noise, however heavy its tails, names nobody."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.plan.dealing import RankWork
from argosy.plan.plan import Plan
from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.slow import (
    MOST_WATCHED_WINDOWS,
    SlowLinkDetector,
    StragglerDetector,
    UnevenStagesDetector,
    chance_of,
)
from resilience.detect.samples import World
from tiny import run_config

STEP_S = 1.0
Noise = Callable[[random.Random], float]
NOISES: dict[str, Noise] = {
    "none": lambda r: 1.0,
    "uniform": lambda r: r.uniform(0.8, 1.2),
    "lognormal": lambda r: r.lognormvariate(0, 0.3),
    "wide lognormal": lambda r: r.lognormvariate(0, 1.0),
    "pareto": lambda r: r.paretovariate(1.2),
    "spikes of 50x in 1 of 20": lambda r: 50.0 if r.random() < 0.05 else r.uniform(0.9, 1.1),
}


def run(
    ranks: int, steps: int, noise: Noise, slow: Callable[[int, int], float] = lambda rank, step: 1.0, seed: int = 0
) -> list[tuple[int, Finding]]:
    """(step, finding) of a world in which each rank's work takes noise times `slow(rank, step)`."""
    world, straggler, random_ = World(ranks, tick_s=STEP_S), StragglerDetector(), random.Random(seed)
    found = []
    for step in range(steps):
        world.step(busy_s={rank: 0.1 * noise(random_) * slow(rank, step) for rank in range(ranks)})
        found += [(step, finding) for finding in straggler.observe(world.sampled())]
    return found


@pytest.mark.parametrize("factor", [2.0, 10.0])
@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize(("noise", "within"), [("none", 21), ("uniform", 21), ("lognormal", 60)])
def test_a_rank_that_is_always_slow_is_named_within_the_window(factor, ranks, noise, within):
    """Within more than one only where noise is about as large as the slowness."""
    found = run(ranks, 100, NOISES[noise], lambda rank, step: factor if rank == 1 and step >= 30 else 1.0)
    assert found and found[0][0] < 30 + within
    assert {finding.ranks for _, finding in found} == {(1,)}
    assert found[0][1].action == "alarm"


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("noise", ["none", "uniform"])
def test_a_rank_that_is_slow_in_one_step_of_five_is_named_within_ten_windows(ranks, noise):
    found = run(ranks, 220, NOISES[noise], lambda rank, step: 10.0 if rank == 1 and step % 5 == 0 else 1.0)
    assert found and {finding.ranks for _, finding in found} == {(1,)}


def test_a_slow_rank_is_to_be_avoided_only_after_long(noise=NOISES["uniform"]):
    found = run(4, 300, noise, lambda rank, step: 2.0 if rank == 3 else 1.0)
    assert [finding.action for _, finding in found] == ["alarm", "avoid"]
    assert found[1][0] - found[0][0] >= 80


def test_one_that_becomes_well_again_is_not_avoided():
    found = run(4, 400, NOISES["uniform"], lambda rank, step: 2.0 if rank == 3 and 50 <= step < 90 else 1.0)
    assert [finding.action for _, finding in found] == ["alarm"]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(16, marks=pytest.mark.slow)]
)
def test_noise_names_no_rank(ranks, noise):
    assert not run(ranks, 4000 // ranks, NOISES[noise], seed=ranks)


def test_what_slows_all_ranks_blames_none():
    assert not run(4, 300, NOISES["uniform"], lambda rank, step: 10.0 if step % 7 == 0 or step > 200 else 1.0)


def test_a_short_time_of_slowness_is_no_straggler():
    """Twenty steps of 10 ms are not enough: `straggler_s` must pass."""
    world, straggler = World(2, tick_s=0.01), StragglerDetector(seconds=10.0)
    found = []
    for step in range(1000):
        world.step(busy_s={0: 0.01, 1: 0.03 if 500 <= step < 600 else 0.01})
        found += straggler.observe(world.sampled())
    assert not found


def test_peers_are_compared_with_each_other_only():
    world, straggler = World(4, tick_s=STEP_S), StragglerDetector()
    pairs = RankWork((range(0, 2), range(2, 4)), np.ones(4), np.ones(4))
    for _ in range(100):
        world.step(busy_s={0: 0.1, 1: 0.1, 2: 0.5, 3: 0.5})
        assert not straggler.observe(world.sampled(), pairs)


MODEL = ModelConfig(layers=8, width=64, heads=4, head_width=16, ffn_width=128, vocab_size=64)


def told(plan: str, busy_s: dict[int, float], microbatches: dict[int, int], steps: int = 150) -> list[Finding]:
    """What is found in a world that is laid out by `plan`."""
    layout = Plan.parse(plan)
    world, straggler = World(layout.world_size, tick_s=STEP_S), StragglerDetector()
    found = []
    for _ in range(steps):
        world.step(busy_s=busy_s, microbatches=microbatches)
        found += straggler.observe(world.sampled(), RankWork.of(layout, MODEL, 64))
    return found


def test_three_quarters_of_the_work_make_no_straggler():
    assert not told("dp_replicate=2,shares=3:1", {0: 0.3, 1: 0.1}, {0: 3, 1: 1})


def test_a_rank_that_is_slow_with_a_quarter_of_the_work_is_one_and_holds_nobody_up():
    (found,) = told("dp_replicate=2,shares=3:1", {0: 0.3, 1: 0.3}, {0: 3, 1: 1})
    assert (found.ranks, found.action) == ((1,), "alarm")
    assert found.evidence["factor"] == 3.0 and found.evidence["step_factor"] == 1.0


def test_one_that_is_slow_and_waited_for_is_to_be_avoided():
    found = told("dp_replicate=2,shares=3:1", {0: 0.3, 1: 0.6}, {0: 3, 1: 1})
    assert [(f.ranks, f.action) for f in found] == [((1,), "alarm"), ((1,), "avoid")]
    assert found[1].evidence["step_factor"] == 2.0


def test_stages_are_compared_by_their_layers():
    fits, slow = {0: 0.6, 1: 0.2}, {0: 0.3, 1: 0.6}
    assert not told("pp=2,layers=6:2", fits, {0: 4, 1: 4})
    assert {f.ranks for f in told("pp=2,layers=6:2", slow, {0: 4, 1: 4})} == {(1,)}


def test_what_head_and_embedding_take_beside_layers_blames_nobody():
    """With so many words, a stage that has the head may well take as long again, or no time at all."""
    wide = MODEL.model_copy(update={"vocab_size": 4096})
    for times in ({0: 0.1, 1: 0.2}, {0: 0.2, 1: 0.1}):
        world, straggler = World(2, tick_s=STEP_S), StragglerDetector()
        for _ in range(150):
            world.step(busy_s=times)
            assert not straggler.observe(world.sampled(), RankWork.of(Plan.parse("pp=2"), wide, 64))


def test_ranks_of_one_stage_are_compared_with_each_other():
    busy_s = {0: 0.1, 1: 0.1, 2: 0.9, 3: 0.3}
    assert {f.ranks for f in told("pp=2,dp_replicate=2,microbatch=1", busy_s, dict.fromkeys(range(4), 2))} == {(2,)}


def test_another_world_begins_anew():
    world, straggler = World(2, tick_s=STEP_S), StragglerDetector()
    for step in range(100):
        if step % 15 == 0:
            world.change(range(2), generation=step // 15, busy_s={})
        world.step(busy_s={0: 0.1, 1: 1.0})
        assert not straggler.observe(world.sampled())


def test_the_chance_is_that_of_a_random_distribution():
    assert chance_of(10, 10, 2) == pytest.approx(2 * 0.5**10, rel=1e-6)
    assert chance_of(5, 10, 2) == 1.0
    assert chance_of(0, 0, 4) == 1.0
    exact = 4 * sum(_choose(20, k) * 0.25**k * 0.75 ** (20 - k) for k in range(14, 21))
    assert exact <= chance_of(14, 20, 4) <= 1.3 * exact


def _choose(n: int, k: int) -> int:
    import math

    return math.comb(n, k)


LINK_STEP_S = 1.0
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


def run_link(
    steps: int,
    own: Callable[[int, int], float] = lambda rank, step: 1.0,
    waited: Callable[[int], float] = lambda step: 1.0,
    next_world: str = "",
    microbatches: Callable[[int], int] = lambda step: 1,
    seed: int = 0,
) -> list[tuple[int, Finding]]:
    """(step, finding) of a world whose own work and waiting take 0.1 s and 0.05 s times what is given."""
    world, link, random_, took = World(4, tick_s=LINK_STEP_S), SlowLinkDetector(), random.Random(seed), {}
    found = []
    for step in range(steps):
        busy_s = {rank: 0.1 * random_.uniform(0.8, 1.2) * own(rank, step) for rank in range(4)}
        took[step] = max(busy_s.values()) + 0.05 * random_.uniform(0.8, 1.2) * waited(step)
        if step == 100 and next_world:
            world.change(range(4), generation=2, busy_s={})
        plan = next_world if step >= 100 and next_world else "dp_replicate=4"
        world.step(busy_s=busy_s, microbatches=dict.fromkeys(range(4), microbatches(step)))
        found += [(step, finding) for finding in link.observe(world.sampled(), took, plan)]
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("times", [4.0, 20.0])
def test_a_link_that_became_slow_is_told_of_once_and_by_how_much(times, seed):
    ((step, finding),) = run_link(300, waited=lambda step: times if step >= 100 else 1.0, seed=seed)
    assert 155 <= step <= 185, "when it has lasted for most of four windows"
    assert (finding.kind, finding.action, finding.ranks) == ("slow_link", "alarm", ())
    grown = 1 + (times - 1) * 0.05 / 0.165
    assert finding.evidence["factor"] == pytest.approx(grown, rel=0.15)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_else_is_taken_for_one(seed):
    assert not run_link(600, seed=seed)
    assert not run_link(300, own=lambda rank, step: 6.0 if rank == 2 and step >= 100 else 1.0, seed=seed), "a slow rank"
    slow = lambda step: 2.0 if step >= 100 else 1.0  # noqa: E731
    assert not run_link(300, own=lambda rank, step: slow(step), waited=slow, seed=seed), "a busy machine"
    assert not run_link(300, waited=lambda step: 20.0 if 100 <= step < 140 else 1.0, seed=seed), "what passes"
    assert not run_link(600, waited=lambda step: 20.0 if step % 3 == 0 else 1.0, seed=seed), "a step of three"
    ramp = lambda step: 16 if step >= 100 else 1  # noqa: E731
    assert not run_link(300, own=lambda rank, step: ramp(step), waited=ramp, microbatches=ramp, seed=seed), (
        "a larger batch"
    )


@pytest.mark.parametrize(("plan", "found"), [("tp=4", 0), ("dp_replicate=4", 1)])
def test_a_new_world_is_compared_with_the_one_before_if_it_has_its_plan(plan, found):
    assert len(run_link(300, waited=lambda step: 20.0 if step >= 100 else 1.0, next_world=plan)) == found


def test_what_a_step_takes_is_known_after_a_window():
    world, link = World(2, tick_s=LINK_STEP_S), SlowLinkDetector()
    for step in range(30):
        world.step()
        link.observe(world.sampled(), dict.fromkeys(range(step + 1), 0.15), "")
        assert (link.step_s is None) == (step < 21), "two that warm up, and twenty"
    assert link.step_s == pytest.approx(0.15)


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
@pytest.mark.parametrize("layers", [(4, 4), pytest.param((2, 2, 2, 2), marks=pytest.mark.slow)])
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
    assert [b - a for a, b in pairwise(steps)] == [
        min(2 * 2**n, MOST_WATCHED_WINDOWS) * 20 for n in range(len(steps) - 1)
    ]
    assert len(steps) >= 6
