"""What a run says when it begins, and when it ends."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from argosy.accelerator import CPU
from argosy.config.train import BatchStage
from argosy.errors import StorageError
from argosy.observe.events import Metrics
from argosy.observe.report import Report
from argosy.observe.screen import Progress
from argosy.plan.cost.prediction import predict
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan
from argosy.training.summary import StepFigures, headline, predicted_beside_measured, write_report
from run_folder import RunFolder
from tiny import run_config

LONG = (
    "dp_replicate=2,dp_shard=16,tp=8,pp=4,cp=2,sequence_parallel=true,zero=3,schedule=interleaved,recompute=full,"
    "precision=bf16,microbatch=4"
)


@pytest.mark.parametrize("plan", [str(Plan()), LONG])
def test_the_headline_fits_a_terminal_and_its_plan_is_whole(plan, monkeypatch):
    monkeypatch.setattr(Plan, "__str__", lambda self: plan)
    lines = headline(run_config(Path("no data")), Plan(), 123e9, None).splitlines()
    assert max(map(len, lines)) <= 80
    assert plan in "".join(line.removeprefix("   ") for line in lines)


def test_only_steps_of_the_whole_batch_stand_beside_the_prediction():
    whole, plan = run_config(Path("no data")), Plan()
    stage = BatchStage(until_step=2, global_batch=whole.train.global_batch // 2)
    run = whole.model_copy(update={"train": whole.train.model_copy(update={"batch_ramp": (stage,)})})
    measured, facts = StepFigures(0), {"memory_before_bytes": 0, "device": "cpu"}
    prediction = predict(plan, run, Cluster.parse("1xcpu"))
    for step, seconds in enumerate([1.0, 1.0, 2.0, 2.0]):
        if step == 2:
            assert predicted_beside_measured(run, plan, prediction, measured, facts) is None, (
                "the run came to no whole batch"
            )
        measured.newest.append({"step": step, "step_time_s": seconds, "seconds": {"forward": seconds}})
    found = predicted_beside_measured(run, plan, prediction, measured, facts)
    assert found is not None and found.step_s.measured == 2.0


def test_bytes_that_a_rank_sends_stand_beside_their_prediction():
    run, plan, measured = run_config(Path("no data")), Plan(dp_replicate=2), StepFigures(0)
    sent = {"communication": {"replicate": {"node": [0.1, 7]}}}
    measured.newest += [{"step": step, "step_time_s": 1.0, "seconds": {"forward": 1.0}} | sent for step in range(3)]
    prediction = predict(plan, run, Cluster.parse("2xcpu"))
    found = predicted_beside_measured(run, plan, prediction, measured, {"memory_before_bytes": 0, "device": "cpu"})
    assert found is not None
    assert {axis: (each.predicted, each.measured) for axis, each in found.sent_bytes.items()} == {
        "replicate": (prediction.traffic["replicate"], 7)
    }


def test_steps_in_which_sites_sum_gradients_are_no_rounds():
    base, plan = run_config(Path("no data")), Plan()
    run = base.model_copy(update={"sites": ("a", "b"), "sync": base.sync.model_copy(update={"from_step": 2})})
    measured, facts = StepFigures(0), {"memory_before_bytes": 0, "device": "cpu"}
    for step, waits_s in enumerate([9.0, 9.0, None, None, 2.0]):
        sites = {"sites": {"seconds": waits_s, "sent_bytes": 8, "steps": 1}} if waits_s else {}
        measured.newest.append({"step": step, "step_time_s": 1.0, "seconds": {"forward": 1.0}} | sites)
    prediction = replace(predict(plan, base, Cluster.parse("1xcpu")), rounds={"waits_s": 3.0}, traffic={"sites": 6})
    found = predicted_beside_measured(run, plan, prediction, measured, facts)
    assert found is not None and found.round_wait_s is not None
    assert (found.round_wait_s.predicted, found.round_wait_s.measured) == (3.0, 2.0)
    assert found.sent_bytes["sites"].measured == 8, "bytes are those of the whole run"


def test_device_time_counts_the_ranks_that_each_step_had(tmp_path: Path) -> None:
    """Two ranks, then eight, then again two that make the eight's steps once more."""
    metrics = Metrics(tmp_path)
    for step in range(12):
        metrics.write({"step": step, "loss": 1.0, "step_time_s": 1.0, "memory_bytes": 1, "seconds": {"step": 2.0}})
    measured = StepFigures(0, [(0, 2), (4, 8)])
    assert len(list(measured.steps(metrics))) == 12 and measured.device_s == 4 * 2 * 2.0 + 8 * 8 * 2.0
    measured = StepFigures(0, [(0, 2), (10, 8), (4, 2)])
    assert len(list(measured.steps(metrics))) == 12 and measured.device_s == 12 * 2 * 2.0


def reported(folder: Path, machine: Cluster | None = None) -> None:
    facts = {"status": "stopped", "peak_flops": 1.0, "time_to_first_step_s": None}
    never: Any = None  # no text is written, and nothing was scored
    run, quiet = run_config(Path("no data")), Progress(enabled=False)
    write_report(run, folder, never, never, None, quiet, Plan(), None, machine, CPU, facts)


def test_the_time_since_the_start_is_no_less_than_that_of_the_steps_although_the_clock_was_set_back(tmp_path):
    run = RunFolder(tmp_path)
    run.event("start", step=0, world_size=1, plan="")
    run.step(0, 1, loss=2.0, seconds={"step": 3600.0}, step_time_s=3000.0)
    reported(tmp_path)
    report = Report.load(tmp_path)
    assert (report.wall_s, report.goodput) == (7200.0, round(6000 / 7200, 4))


def test_goodput_and_money_are_of_the_time_in_which_the_run_held_its_devices(tmp_path: Path) -> None:
    run, now_s = RunFolder(tmp_path), time.time()
    for ago_s, kind, facts in (
        (9000.0, "start", {"world_size": 2, "price_per_device_h": 1.0, "currency": "EUR"}),
        (8000.0, "end", {}),
        (1000.0, "start", {"world_size": 4, "price_per_device_h": 3.0, "currency": "EUR"}),
    ):
        run.event(kind, step=0, plan="", time_s=now_s - ago_s, **facts)
    run.step(0, 1, loss=2.0, seconds={"step": 500.0}, step_time_s=500.0)
    reported(tmp_path, Cluster.parse("4xh100").model_copy(update={"price_per_device_h": 3.0, "currency": "EUR"}))
    report = Report.load(tmp_path)
    assert report.wall_s == pytest.approx(9000.0, rel=0.01) and report.goodput == pytest.approx(0.5, rel=0.01)
    assert report.energy is not None and report.energy.money == pytest.approx((2 * 1 + 4 * 3) / 3.6, rel=0.01)


def test_a_report_that_cannot_be_written_is_a_matter_of_the_disk(tmp_path):
    run = RunFolder(tmp_path)
    run.event("start", step=0, world_size=1, plan="")
    run.step(0, seconds={"step": 1.0})
    (tmp_path / "report.json").mkdir()
    with pytest.raises(StorageError, match=r"report could not be written .* The state is saved"):
        reported(tmp_path)
