"""What one plan of one run will take: totals that add up, state and traffic exact, and a file that keeps it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.plan.cost.breakdown import OF_TIME
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.exact_state import state_bytes
from argosy.plan.cost.prediction import Prediction, predict
from argosy.plan.cost.traffic import traffic
from argosy.plan.hardware.clusters import Cluster, Factor
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan

CLUSTER = Cluster.parse("8xh100")
PLANS = [
    "dp_shard=8,precision=bf16",
    "dp_replicate=2,tp=4,precision=bf16",
    "pp=2,dp_shard=2,tp=2,recompute=full,precision=bf16",
    "dp_shard=4,cp=2,zero=1,precision=fp32",
]


def llama(batch: int = 16) -> RunConfig:
    return load(
        None,
        {"model.preset": "llama3-8b", "data.seq_len": 4096, "train.global_batch": batch, "model.vocab_size": 128256},
    )


@pytest.mark.parametrize("plan", PLANS)
def test_parts_add_up_to_totals_inside_their_intervals(plan):
    found = predict(Plan.parse(plan), llama(), CLUSTER)
    for total, parts in ((found.step_s, found.seconds), (found.memory_bytes, found.memory)):
        assert sum(parts.values()) == pytest.approx(total.mid)
        assert min(parts.values()) >= 0
        assert total.low < total.mid < total.high


@pytest.mark.parametrize("plan", PLANS)
def test_state_and_traffic_are_those_of_the_exact_tables(plan):
    plan, run = Plan.parse(plan), llama()
    found = predict(plan, run, CLUSTER)
    exact = [state_bytes(plan, run, rank) for rank in (0, plan.world_size // 2)]
    assert (found.memory["weights"], found.memory["optimizer"]) in [(e.parameters, e.optimizer) for e in exact]
    assert sum(found.traffic.values()) == sum(traffic(plan, run).values())


@pytest.mark.parametrize("plan", [*PLANS, "dp_shard=8,microbatch=1", "dp_shard=8,microbatch=2"])
def test_a_run_is_predicted_the_memory_that_its_plan_was_chosen_by(plan):
    """Also where whole gradients add up over microbatches, though each rank has a part of them in the end."""
    plan, run = Plan.parse(plan), llama()
    chosen_by = CostModel.of(run, CLUSTER).as_started().predict_memory(Layouts.of([plan])).total[0]
    assert predict(plan, run, CLUSTER).memory_bytes.mid == pytest.approx(chosen_by, rel=0.01)


def test_a_run_that_checks_its_gradients_is_predicted_to_hold_two_at_a_time():
    plan, run = Plan.parse("dp_replicate=8"), llama()
    checks = run.model_copy(update={"resilience": run.resilience.model_copy(update={"replay_check_every_steps": 9})})
    once, twice = (predict(plan, each, CLUSTER) for each in (run, checks))
    assert twice.memory["gradients"] == 2 * once.memory["gradients"]
    models = [CostModel.of(each, CLUSTER) for each in (run, checks)]
    searched = [float(costs.predict_memory(Layouts.of([plan])).total[0]) for costs in models]
    assert searched[1] - searched[0] == pytest.approx(once.memory["gradients"], rel=1e-3)


def test_offloaded_moments_are_not_on_the_device():
    kept, gone = (predict(Plan.parse(f"dp_shard=8,offload={where}"), llama(), CLUSTER) for where in ("none", "all"))
    assert kept.memory["optimizer"] > gone.memory["optimizer"] == 0


def test_factors_of_the_cluster_change_their_parts_and_narrow_the_interval():
    known = {"compute": Factor(value=2.0, std=0.01), "network": Factor(value=1.0, std=0.01)}
    plan = Plan.parse(PLANS[1])
    before = predict(plan, llama(), CLUSTER)
    after = predict(plan, llama(), CLUSTER.model_copy(update={"factors": known}))
    ratios = {name: after.seconds[name] / value for name, value in before.seconds.items() if value}
    assert {name for name, ratio in ratios.items() if ratio == pytest.approx(2.0)} == set(OF_TIME["compute"]) & {
        *ratios
    }
    assert after.step_s.high / after.step_s.mid < before.step_s.high / before.step_s.mid


def test_the_plans_file_keeps_the_prediction_and_is_still_the_plan(tmp_path):
    plan = Plan.parse(PLANS[0])
    found = predict(plan, llama(), CLUSTER.model_copy(update={"name": 'the "big" one \\ here'}))
    plan.save(tmp_path / "plan.toml", found.toml())
    assert Plan.load(tmp_path / "plan.toml") == plan
    kept = Prediction.load(tmp_path / "plan.toml")
    assert kept.cluster == 'the "big" one \\ here' and kept.traffic == found.traffic
    assert kept.step_s.high == pytest.approx(found.step_s.high, rel=1e-5)
    assert kept.memory == pytest.approx({name: value for name, value in found.memory.items() if value}, rel=1e-5)
    assert found.in_words().split(" a step, ")[1].endswith(" MB a rank")


def test_matmuls_that_are_faster_than_the_device_is_said_to_be_are_read_from_the_file(tmp_path):
    found = predict(Plan.parse(PLANS[0]), llama(), CLUSTER)
    faster = replace(found, seconds=found.seconds | {"matmul": -0.125})
    (tmp_path / "plan.toml").write_text(faster.toml())
    kept = Prediction.load(tmp_path / "plan.toml")
    assert kept is not None and kept.seconds["matmul"] == -0.125


def test_a_file_without_a_prediction_has_none(tmp_path):
    Plan().save(tmp_path / "plan.toml")
    assert Prediction.load(tmp_path / "plan.toml") is None
    assert Prediction.load(tmp_path / "none.toml") is None


def test_a_run_waits_little_for_its_prediction():
    began = time.process_time()
    predict(Plan.parse(PLANS[2]), llama(), CLUSTER)
    assert time.process_time() - began < 1.0


def test_a_site_s_prediction_has_its_rounds_and_keeps_them_in_the_file(tmp_path):
    two = Cluster.parse("two-sites")
    asked = llama().model_copy(update={"sites": ("east", "west")})  # only that there are some counts here
    plan = Plan.parse("dp_shard=64,precision=bf16,sync=diloco")
    found = predict(plan, asked, two.of_site("east"), two)
    assert found.rounds["steps"] == asked.sync.every_steps
    assert found.rounds["waits_s"] == pytest.approx(found.rounds["seconds"])
    assert found.rounds["seconds"] > found.rounds["sent_bytes"] / 12.5e9
    assert found.rounds["step_s"] == pytest.approx(found.rounds["seconds"] / asked.sync.every_steps)
    assert predict(plan, asked, two.of_site("east")).rounds == {}
    plan.save(tmp_path / "plan.toml", found.toml())
    read = Prediction.load(tmp_path / "plan.toml")
    assert read is not None and read.rounds == pytest.approx(found.rounds)


@pytest.mark.parametrize(
    "wrong",
    [
        'seconds = "<b>"',
        "seconds = {ideal = nan}",
        'memory = {weights = "1"}',
        "step_s = [1, 2, -3]",
        f"traffic = {{a = 1{'0' * 99}}}",
    ],
)
def test_what_is_no_prediction_in_a_plan_file_is_refused(tmp_path, wrong):
    rows = {"cluster": '"x"', "step_s": "[0.1, 0.2, 0.3]", "memory_bytes": "[1, 2, 3]"}
    rows |= dict([wrong.split(" = ", 1)])
    (tmp_path / "plan.toml").write_text("[prediction]\n" + "\n".join(f"{key} = {row}" for key, row in rows.items()))
    with pytest.raises(ValueError, match="prediction"):
        Prediction.load(tmp_path / "plan.toml")
