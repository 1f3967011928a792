"""Slow ranks are named within the window; noise, however heavy its tails, names nobody."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from argosy.config.model import ModelConfig
from argosy.plan.dealing import RankWork
from argosy.plan.plan import Plan
from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.straggler import StragglerDetector, chance_of
from resilience.detect.samples import World

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
@pytest.mark.parametrize("ranks", [2, 4, 16])
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
