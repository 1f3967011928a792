"""Predicted beside measured, part by part."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args

import pytest

from argosy.observe.clock import Category
from argosy.observe.heartbeat import BESIDE
from argosy.plan.calibration import PARTS, Reconciled, part_of, reconcile
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.prediction import Prediction
from argosy.plan.cost.step_time import StepTime
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
    predicted = [name for part in PARTS.values() for name in part.predicted]
    measured = [name for part in PARTS.values() for name in part.measured]
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
