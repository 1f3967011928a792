"""Measured parts stand beside predicted ones, and finished runs move factors as far as they tell."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from argosy.cli import main
from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.observe.counters import Category
from argosy.observe.heartbeat import BESIDE
from argosy.plan.calibration import (
    CALIBRATED_PARTS,
    FACTOR_STD,
    Reconciled,
    cluster_file,
    in_words,
    learn,
    part_of,
    reconcile,
)
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.prediction import Prediction, predict
from argosy.plan.cost.step_time import StepTime
from argosy.plan.hardware.clusters import Cluster, Factor
from argosy.plan.hardware.local_machine import resized
from argosy.plan.plan import Plan

PREDICTION = Prediction(
    cluster="8 h100",
    step_s=Estimate(0.8, 1.0, 1.25),
    seconds={"ideal": 0.5, "tensor": 0.1, "bubble": 0.1, "gradients": 0.2, "optimizer": 0.07, "other": 0.03},
    memory_bytes=Estimate(80e6, 100e6, 120e6),
    memory={"weights": 60e6, "activations": 30e6, "reserve": 10e6},
    traffic={},
)
CLOCK = {"data": 0.01, "forward": 0.3, "backward": 0.6, "communication": 0.1, "optimizer": 0.05, "other": 0.02}


def compared(plan: str = "dp_replicate=8", with_reserve: bool = True) -> Reconciled:
    return reconcile(PREDICTION, Plan.parse(plan), CLOCK, 90e6, with_reserve)


def test_every_second_is_in_one_part_on_both_sides():
    predicted = [name for part in CALIBRATED_PARTS.values() for name in part.predicted]
    measured = [name for part in CALIBRATED_PARTS.values() for name in part.measured]
    assert sorted(predicted) == sorted([*(f.name for f in fields(StepTime)), "sites"])  # pushes of workers
    assert sorted(measured) == sorted({*get_args(Category), "other"} - set(BESIDE))


def test_parts_add_up_to_the_step():
    found = compared()
    for side in ("predicted", "measured"):
        assert sum(getattr(part, side) for part in found.seconds.values()) == pytest.approx(getattr(found.step_s, side))
    passes = found.seconds["forward_backward"]
    assert (passes.predicted, passes.measured) == (pytest.approx(0.7), pytest.approx(0.9))
    assert passes.ratio == pytest.approx(9 / 7)
    assert (found.step_s.low, found.step_s.high) == (0.8, 1.25)


def test_where_parameters_are_shared_their_gathering_is_inside_the_passes():
    assert part_of("gradients", Plan.parse("dp_shard=8")) == "forward_backward"
    assert part_of("gradients", Plan.parse("dp_shard=8,zero=2")) == "communication"
    assert compared("dp_shard=8").seconds["communication"].ratio is None


def test_memory_that_the_device_counts_without_reserve_is_compared_without():
    on_cpu, on_gpu = compared().memory_bytes, compared(with_reserve=False).memory_bytes
    assert (on_cpu.predicted, on_gpu.predicted) == (100e6, pytest.approx(90e6))
    assert on_gpu.ratio == pytest.approx(1.0)
    assert on_gpu.high == pytest.approx(108e6)


def test_a_person_sees_a_small_table():
    lines = compared().in_words().splitlines()
    assert lines[0] == "predicted for 8 h100:"
    assert [line.split()[0] for line in lines[2:]] == [
        "forward",
        "communication",
        "optimizer",
        "rest",
        "step",
        "memory",
    ]
    assert lines[-2].split() == ["step", "1.00", "s", "1.08", "s", "1.08", "0.80", "s", "to", "1.25", "s"]
    assert max(map(len, lines)) < 80


def test_bytes_that_were_sent_stand_beside_those_of_the_plan():
    prediction = replace(PREDICTION, traffic={"replicate": 2_000_000, "tp": 5})
    found = reconcile(prediction, Plan(), CLOCK, 90e6, True, {"replicate": 2_500_000.0})
    assert found.sent_bytes["replicate"].ratio == 1.25
    assert "  sent: replicate        2.00 MB     2.50 MB    1.25" in found.in_words()


def test_the_wait_of_a_round_stands_beside_its_prediction():
    rounds = {"steps": 10, "seconds": 3.0, "waits_s": 2.0, "sent_bytes": 1e6}
    found = reconcile(replace(PREDICTION, rounds=rounds), Plan(), CLOCK, 90e6, True, round_wait_s=2.5)
    assert found.round_wait_s is not None and found.round_wait_s.ratio == pytest.approx(1.25)
    assert "wait of a round" in found.in_words()
    assert reconcile(PREDICTION, Plan(), CLOCK, 90e6, True, round_wait_s=2.5).round_wait_s is None


CLUSTER = Cluster.parse("4xcpu").model_copy(update={"software": "torch 2.13"})
TRUTH = {"compute": 2.0, "network": 3.0, "optimizer": 0.5, "rest": 4.0, "memory": 1.5}
PLANS = ("microbatch=4", "dp_replicate=4,microbatch=4", "dp_shard=2,microbatch=4", "tp=2,microbatch=4", "pp=4")
NOISE = np.random.default_rng(0).normal(0.0, 0.05, 100)


@cache
def predicted(plan: str) -> tuple[Plan, RunConfig, Prediction, Prediction]:
    """A plan, its run, what is predicted, and what is with TRUTH."""
    layout = Plan.parse(f"{plan},compile=false")
    sizes = {"train.minutes": 0, "train.steps": 8, "train.global_batch": 16, "model.vocab_size": 4096}
    run = load("demo", {**sizes, "launch.processes": layout.world_size})
    factors = {name: Factor(value=value, std=0.1) for name, value in TRUTH.items()}
    plain = predict(layout, run, resized(CLUSTER, layout.world_size))
    real = predict(layout, run, resized(CLUSTER.model_copy(update={"factors": factors}), layout.world_size))
    return layout, run, plain, real


def finished(folder: Path, plan: str, noise: float = 0.0, **report: Any) -> Path:
    """The folder of a run whose steps took TRUTH times what is predicted, and exp(noise) of that."""
    layout, run, plain, real = predicted(plan)
    compared = reconcile(plain, layout, {}, float(real.memory_bytes.mid) * np.exp(noise), with_reserve=True)
    truth = reconcile(real, layout, {}, 0.0, with_reserve=True)
    seconds = {name: truth.seconds[name].predicted * float(np.exp(noise)) for name in CALIBRATED_PARTS}
    compared = compared.model_copy(
        update={
            "seconds": {name: c.model_copy(update={"measured": seconds[name]}) for name, c in compared.seconds.items()},
            "step_s": compared.step_s.model_copy(update={"measured": sum(seconds.values())}),
        }
    )
    folder.mkdir()
    save_run(run, folder / "run.toml")
    layout.save(folder / "plan.toml", plain.toml())
    said = {"device": "cpu", "software": "torch 2.13", "predicted": compared.model_dump(), **report}
    (folder / "report.json").write_text(json.dumps(said))
    return folder


def runs(tmp_path: Path, times: int) -> list[Path]:
    """Every plan so many times, each a little otherwise."""
    named = [(plan, i) for i in range(times) for plan in PLANS]
    return [finished(tmp_path / f"{n}", plan, float(NOISE[n])) for n, (plan, _) in enumerate(named)]


def test_many_runs_tell_each_factor_also_where_one_part_holds_several(tmp_path):
    found = learn(runs(tmp_path, times=4), CLUSTER).factors
    for name in ("compute", "network", "memory"):
        assert abs(np.log(found[name].value / TRUTH[name])) < 3 * found[name].std / found[name].value + 0.05, name
        assert found[name].value == pytest.approx(TRUTH[name], rel=0.15)


def test_few_runs_move_a_factor_less_and_say_less_surely(tmp_path):
    folders = runs(tmp_path, times=2)
    one, many = (learn(some, CLUSTER).factors["compute"] for some in (folders[:1], folders))
    assert 1 < one.value < many.value < 1.1 * TRUTH["compute"]
    assert one.std / one.value > 2 * many.std / many.value


def test_what_no_run_tells_about_has_no_factor(tmp_path):
    found = learn([finished(tmp_path / "alone", "microbatch=4")], CLUSTER).factors
    assert "network" not in found and "compute" in found
    assert all(factor.std / factor.value < FACTOR_STD for factor in found.values())


def test_learning_again_gives_the_same_since_it_starts_from_the_runs_alone(tmp_path):
    folders = runs(tmp_path, times=1)
    once = learn(folders, CLUSTER)
    assert learn(folders, once) == once


def test_a_taught_cluster_predicts_the_runs(tmp_path):
    folders = runs(tmp_path, times=2)
    taught = learn(folders, CLUSTER)
    for folder in folders[: len(PLANS)]:
        plan, run = Plan.load(folder / "plan.toml"), load(folder / "run.toml")
        measured = json.loads((folder / "report.json").read_text())["predicted"]
        found = predict(plan, run, resized(taught, plan.world_size))
        assert found.step_s.mid == pytest.approx(measured["step_s"]["measured"], rel=0.2)
        assert found.memory_bytes.mid == pytest.approx(measured["memory_bytes"]["measured"], rel=0.2)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"predicted": None}, "its report has no measured parts of a step"),
        ({"device": "NVIDIA H100 80GB HBM3"}, "it ran on NVIDIA H100 80GB HBM3, and the cluster has CPU"),
        ({"software": "torch 2.12"}, "ran with torch 2.13, and"),
        ({"software": None}, "b: report.json is not as this version writes it (software: "),
        ({"predicted": {"step_s": 1.0}}, "(predicted.cluster: Field required). Leave it out, or run it again."),
        ({"predicted": [1.0]}, "(predicted: "),
    ],
)
def test_runs_that_tell_nothing_of_this_cluster_are_refused(tmp_path, report, message):
    folders = [finished(tmp_path / "a", PLANS[0]), finished(tmp_path / "b", PLANS[0], **report)]
    with pytest.raises(UserError, match="--learn") as error:
        learn(folders, CLUSTER)
    assert message in str(error.value)


def test_a_folder_without_a_report_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no report\.json\. Give the folders of finished runs"):
        learn([tmp_path], CLUSTER)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(UserError, match=r"report\.json cannot be read"):
        learn([tmp_path], CLUSTER)
    with pytest.raises(UserError, match=r"there is no report\.json\. Give the folders of finished runs"):
        learn([tmp_path / "report.json"], CLUSTER)
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(UserError, match="its report has no measured parts of a step"):
        learn([tmp_path], CLUSTER)


def test_the_command_corrects_the_file_and_says_how(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--learn", "run"]) == 2
    assert "argosy probe" in capsys.readouterr().err
    CLUSTER.save(tmp_path / "cluster.toml")
    finished(tmp_path / "run", PLANS[1])
    assert main(["plan", "--learn", "run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("cluster.toml: factors from 1 run with torch 2.13:\n")
    after = Cluster.load(tmp_path / "cluster.toml")
    assert f"compute    {after.factors['compute'].value:.2f} +- " in said
    assert main(["plan", "--learn", "run", "--cluster", "8xh100"]) == 2


def test_other_software_starts_anew(tmp_path):
    folder = finished(tmp_path / "run", PLANS[0], software="torch 2.14")
    before = CLUSTER.model_copy(update={"factors": {"network": Factor(value=2.0, std=0.1)}})
    after = learn([folder], before)
    assert after.software == "torch 2.14" and "network" not in after.factors
    said = in_words(before, after, 1)
    assert "(before, the file held factors for torch 2.13)" in said
    assert "network    none: no run tells   was 2.00 +- 0.10" in said


def test_only_a_file_can_be_corrected(tmp_path):
    with pytest.raises(UserError, match="--learn writes factors into a cluster's file, and 8xh100 is not one"):
        cluster_file("8xh100")
    CLUSTER.save(tmp_path / "mine.toml")
    assert cluster_file(str(tmp_path / "mine.toml")) == tmp_path / "mine.toml"
