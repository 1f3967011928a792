"""After a loss the run goes on with the best plan on what is left, and what it computes stays."""

from __future__ import annotations

import math

import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.prediction import predict
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan
from argosy.plan.search.replan import Replanned, replan, step_with_slow_rank_s, with_slow_link, worth_migrating
from argosy.plan.search.space import check_plan

CPUS, GPUS = Cluster.parse("4xcpu"), Cluster.parse("16xh100")


def run(plan: str = "auto", preset: str = "llama-5m", batch: int = 8, seq_len: int = 256) -> RunConfig:
    sizes = {"data.seq_len": seq_len, "train.global_batch": batch, "model.vocab_size": 4096}
    return load(None, {"model.preset": preset, "plan": plan, **sizes})


def left(processes: int, now: str, written: str = "auto", machine: Cluster = CPUS, **keys: object) -> Replanned:
    """What is planned for so many processes; it can train the run."""
    run_, plan = run(written, **keys), Plan.parse(now)
    found = replan(run_, plan, machine, processes)
    check_plan(found.plan, run_, processes - found.spares)
    assert [getattr(found.plan, key) for key in NUMERICS] == [getattr(plan, key) for key in NUMERICS]
    return found


NUMERICS = ("precision", "weights", "reduce", "sync", "compile")


@pytest.mark.parametrize(
    ("now", "written", "processes"),
    [
        ("dp_replicate=2,microbatch=4", "auto", 1),
        ("dp_replicate=2,precision=bf16,compile=false", "dp_replicate=2,compile=false", 1),
        ("pp=3", "auto", 2),
        ("pp=4,schedule=zbv,compile=false", "pp=4,schedule=zbv,compile=false", 3),
        ("tp=4", "tp=4", 3),
        ("dp_shard=4", "dp_shard=4", 3),
        ("dp_shard=2,tp=2", "auto,tp=2", 2),
    ],
)
def test_any_plan_goes_on_with_fewer_processes(now, written, processes):
    found = left(processes, now, written)
    assert found.spares < processes and found.step_s > 0


def test_one_replica_goes_on_where_several_compressed_their_sums():
    run_ = run(written := "dp_replicate=2,sync=int8")
    found = replan(run_, Plan.parse(written), CPUS, 1)
    check_plan(found.plan, run_, 1)
    assert found.plan.sync == "exact" and "sync=int8" in found.notes[0]
    assert left(2, "dp_replicate=4,sync=int8", "dp_replicate=4,sync=int8").plan.dp_replicate == 2


def test_experts_go_on_too():
    found = left(3, "dp_shard=4,ep=4,zero=1", "auto,ep=4", preset="mixtral-10m")
    assert found.plan.world_size + found.spares == 3
    assert any("ep=4" in note for note in found.notes)


def test_what_the_user_wrote_comes_back_with_the_processes():
    written = "dp_shard=4,microbatch=1,compile=false"
    three = left(3, written, written)
    assert any("dp_shard=4" in note for note in three.notes)
    four = left(4, str(three.plan), written)
    assert four.plan == Plan.parse(written) and not four.notes


@pytest.mark.parametrize("processes", [2, 4])
def test_a_pinned_axis_is_kept_where_that_costs_little(processes):
    found = left(processes, "dp_replicate=2,tp=2", "auto,tp=2")
    assert found.plan.tp == 2 and not found.notes


def test_a_pinned_axis_is_given_up_with_a_note_where_too_little_would_be_used():
    found = left(1, "dp_replicate=2,tp=2", "auto,tp=2")
    assert found.plan.tp == 1
    assert found.notes == ('not kept of plan = "auto,tp=2": tp=2.',)


def test_processes_that_no_plan_can_use_are_spares():
    """5 divides neither the batch, nor the heads, nor the sequence; and the pipeline is pinned."""
    found = left(5, "dp_shard=4", "auto,pp=1", machine=GPUS)
    assert (found.plan.world_size, found.spares) == (4, 1)
    assert any("1 of 5 processes" in note for note in found.notes)


def test_a_large_model_loses_little_with_one_gpu():
    """15 GPUs are best used by a plan for 12 or more: pipelines, or shares of other sizes."""
    found = left(15, "dp_shard=16,precision=bf16", machine=GPUS, preset="llama3-8b", batch=240, seq_len=8192)
    assert found.spares <= 3


def test_norms_stay_in_the_precision_that_they_had():
    gathered = left(8, "dp_shard=16,precision=bf16", machine=GPUS, preset="llama3-8b", batch=64)
    assert gathered.plan.shards_parameters and not gathered.notes
    not_gathered = left(8, "dp_shard=16,zero=1,precision=bf16", machine=GPUS, preset="llama3-8b", batch=64)
    assert not not_gathered.plan.shards_parameters


def test_what_does_not_fit_what_is_left_is_refused_with_the_figures():
    with pytest.raises(UserError, match=r"on the 1 process left nothing fits: .* needs [\d.]+ GiB"):
        left(1, "dp_shard=16,precision=bf16", machine=GPUS, preset="llama3-70b", batch=64)
    with pytest.raises(UserError, match="no process is left"):
        left(0, "dp_replicate=2")


def test_a_move_must_pay_for_itself_twice_and_save_a_tenth():
    assert worth_migrating(1.0, 0.8, steps_left=1000, migration_s=60)
    assert not worth_migrating(1.0, 0.8, steps_left=500, migration_s=60)  # saves 100 s, and takes 60
    assert not worth_migrating(1.0, 0.95, steps_left=10**6, migration_s=1)  # predictions are not that sure
    assert not worth_migrating(1.0, 1.2, steps_left=10**6, migration_s=0)
    assert not worth_migrating(math.nan, 0.8, steps_left=10**6, migration_s=1)
    assert not worth_migrating(math.inf, 0.8, steps_left=10**6, migration_s=1)


REPLICAS = Plan.parse("dp_replicate=4,precision=fp32,compile=false")


@pytest.mark.parametrize("times", [1.0, 2.0, 6.0])
def test_a_step_with_a_slow_rank_takes_that_rank_s_own_work_so_many_times_as_long(times):
    usual = predict(REPLICAS, run(), CPUS)
    waits_s = usual.seconds["gradients"] + usual.seconds["other"]
    expected = times * (usual.step_s.mid - waits_s) + waits_s
    assert step_with_slow_rank_s(run(), REPLICAS, CPUS, times) == pytest.approx(expected)


@pytest.mark.parametrize("times", [1.5, 3.0])
def test_links_are_as_slow_as_the_step_says(times):
    slow = with_slow_link(run(), REPLICAS, CPUS, times)
    assert predict(REPLICAS, run(), slow).step_s.mid == pytest.approx(times * predict(REPLICAS, run(), CPUS).step_s.mid)
    twice = with_slow_link(run(), REPLICAS, slow, 2.0)
    assert predict(REPLICAS, run(), twice).step_s.mid == pytest.approx(2 * predict(REPLICAS, run(), slow).step_s.mid)


def test_no_link_explains_a_plan_that_sends_nothing():
    with pytest.raises(UserError, match="is not predicted to wait for any link"):
        with_slow_link(run(), Plan.parse("precision=fp32,compile=false"), CPUS, 2.0)
