"""Replicas of unlike speed get microbatches by their measured speed, and the losses stay those of an even run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from argosy.faults import arm
from argosy.observe.events import each_line
from argosy.observe.heartbeat import Heartbeat, read_heartbeat
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.loop import train
from argosy.training.parts import plan_in_force
from argosy.training.services.rebalance import rebalanced
from argosy.training.stop import StopSignal
from tiny import eager, losses, run_config, train_in

PLAN = Plan.parse("dp_replicate=2,microbatch=1")


def run_of(**train: Any) -> Any:
    return run_config(Path("no data"), train={"steps": 40, "global_batch": 8} | train, resilience={"rebalance": True})


@pytest.mark.parametrize(
    ("plan", "each_s", "shares"),
    [
        ("dp_replicate=2", (1.0, 3.0), "3:1"),
        ("dp_replicate=2", (1.0, 1.1), None),  # seven of eight microbatches cannot be dealt out better
        ("dp_replicate=2,shares=3:1", (1.0, 1.0), ""),
        ("dp_replicate=2,shares=3:1", (1.0, 3.2), None),
        ("dp_replicate=2,dp_shard=2", (3.0, 1.0), "1:3"),
        ("pp=2,dp_replicate=2", (1.0, 7.0), None),  # one microbatch does not fill the pipeline
        ("dp_shard=4,zero=1", (1.0, 1.0, 1.0, 9.0), "2:2:3:1"),  # nobody gets none
    ],
)
def test_microbatches_go_to_those_that_are_fast(plan, each_s, shares):
    layout = Plan.parse(plan)
    found = rebalanced(run_of(), layout, each_s, 8.0, 8)
    assert (found and found.plan.shares) == shares
    if found is not None:
        assert found.plan.model_copy(update={"shares": layout.shares}) == layout
        assert found.predicted_s < 8.0


def test_what_is_saved_is_predicted_for_the_step_at_hand():
    found = rebalanced(run_of(), PLAN, (1.0, 3.0), 13.0, 8)
    assert found is not None and found.predicted_s == pytest.approx(13 - 12 + 6)  # 4 x 3 s became 2 x 3 s
    ramp = run_of(batch_ramp=[{"until_step": 2, "global_batch": 4}])
    found = rebalanced(ramp, PLAN, (1.0, 3.0), 7.0, 4)
    assert found is not None and found.plan.shares == "3:1"
    assert found.predicted_s == pytest.approx(7 - 6 + 3)


def test_a_change_that_saves_little_of_the_step_is_not_made():
    assert rebalanced(run_of(), PLAN, (1.0, 3.0), 8 / 0.04, 8) is None


def test_shares_are_of_replicas_or_of_ranks_that_gather_nothing_together():
    plans = {
        "dp_replicate=2,dp_shard=2": 2,
        "dp_shard=4,zero=2": 4,
        "dp_shard=4,zero=3": 1,
        "dp_shard=2,ep=2,zero=1": 1,
    }
    assert {plan: Plan.parse(plan).holders_of_shares for plan in plans} == plans


def test_without_the_key_nothing_is_measured(trainer):
    made = trainer()
    outcome = made.exchange(made.forward_backward(made.batch(0)))
    assert set(outcome.sums.values()) == {()}


def test_a_world_goes_on_with_the_shares_of_the_folder(tmp_path):
    run = run_of()
    assert plan_in_force(run, PLAN, World(), tmp_path) == PLAN
    for shares, expected in (("3:1", "3:1"), ("", "")):
        PLAN.model_copy(update={"shares": shares}).save(tmp_path / "plan.toml")
        assert plan_in_force(run, PLAN, World(), tmp_path).shares == expected
    Plan.parse("dp_shard=2,zero=1,shares=3:1").save(tmp_path / "plan.toml")
    assert plan_in_force(run, PLAN, World(), tmp_path) == PLAN


def own_work(world: World, corpus: Path, folder: Path) -> list[float]:
    """Seconds of own work in the last steps of a pipeline whose rank 1 takes longer, by rank, as heartbeats show it."""
    run = run_config(corpus, model={"layers": 4}, evaluate={"every_steps": 0, "tokens": 600})
    heartbeat = Heartbeat(folder / str(world.rank))
    arm("slow@forward:seconds=0.4" if world.rank == 1 else "")
    try:
        train(run, eager("pp=2,layers=3:1"), world, folder / "run", StopSignal(), None, heartbeat)
    finally:
        arm("")
        shown = read_heartbeat(heartbeat.path)
        heartbeat.close()
    assert shown is not None and set(shown.microbatches.values()) == {2}
    return [shown.busy_s[step] for step in range(3, 8)]


def test_stages_of_a_pipeline_show_their_own_work(workers, corpus, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    fast, slow = workers.run(2, own_work, corpus, tmp_path)
    assert statistics.median(fast) < 0.4 < statistics.median(slow)


def trained(
    world: World, corpus: Path, folder: Path, plan: str, rebalance: bool, slow_s: float
) -> list[dict[str, Any]]:
    """The records of a run in which rank 1 takes so much longer for each microbatch."""
    run = run_config(
        corpus,
        train={"steps": 18, "global_batch": 8},
        resilience={"rebalance": rebalance, "on_bad_step": "stop"},
        evaluate={"every_steps": 16, "tokens": 600},
    )
    if world.rank == 1 and slow_s:
        arm(f"slow@forward:seconds={slow_s}")
    try:
        return train_in(world, run, eager(plan), folder)
    finally:
        arm("")


@pytest.mark.parametrize(
    "plan", ["dp_replicate=2,microbatch=1", pytest.param("dp_shard=2,zero=2,microbatch=1", marks=pytest.mark.slow)]
)
def test_a_slow_rank_gets_less_and_the_losses_stay(workers, corpus, tmp_path, plan):
    even, found = tmp_path / "even", tmp_path / "rebalanced"
    expected = workers.run(2, trained, corpus, even, plan, False, 0.0)[0]
    records = workers.run(2, trained, corpus, found, plan, True, 0.05)[0]
    assert losses(records) == pytest.approx(losses(expected), rel=1e-5)
    assert [r["validation_loss"] for r in records if "validation_loss" in r] == pytest.approx(
        [r["validation_loss"] for r in expected if "validation_loss" in r], rel=1e-5
    )
    samples = [(r["first_sample"], r["samples"]) for r in records if "samples" in r]
    assert samples == [(8 * step, 8) for step in range(18)]
    (told,) = [e for e in each_line(found / "events" / "rank-0.jsonl") if e["event"] == "rebalanced"]
    fast, slow = map(int, told["shares"].split(":"))
    assert fast > slow and told["before"] == "" and told["predicted_s"] < told["step_s"]
    assert Plan.load(found / "plan.toml").shares == told["shares"]
    assert Plan.load(found / f"plan-{told['step']:08d}.toml").shares == ""
