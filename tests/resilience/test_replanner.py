"""What the planner says of a slow node and of a slow link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.plan.cost import heterogeneous
from argosy.plan.plan import Plan
from argosy.plan.quantities import numbers_of
from argosy.resilience.replanner import MigrationAnswer, MigrationQuestion, answer, steps_left

PLAN = "dp_replicate=4,microbatch=4,precision=fp32,compile=false"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run on four nodes of one CPU process each."""
    keys = {"model.preset": "llama-5m", "model.vocab_size": 4096, "plan": PLAN, "data.seq_len": 256}
    save_run(load(None, {**keys, "train.global_batch": 48, "train.steps": 5000}), tmp_path / "run.toml")
    hardware = {"device": "cpu", "processes": 4, "per_node": 1, "peak_flops_per_s": {"fp32": 5e10}}
    (tmp_path / "events").mkdir()
    start = {"time_s": 1.0, "event": "start", "hardware": hardware}
    (tmp_path / "events" / "rank-0.jsonl").write_text(json.dumps(start) + "\n")
    return tmp_path


def ask(run_dir: Path, kind: Any = "slow_node", on: tuple[int, ...] = (3,), **keys: Any) -> MigrationAnswer:
    facts = {"plan": PLAN, "times": 6.0, "step": 1000, "step_s": 2.0, "migration_s": 10.0, **keys}
    return answer(run_dir, MigrationQuestion(kind, on=on, **facts))


def test_without_a_node_that_takes_six_times_as_long_the_others_are_faster(run_dir):
    said = ask(run_dir)
    assert said.pays and said.size == 3 and said.on == 3 and said.steps_left == 4000
    assert said.predicted_now_s / said.predicted_new_s > 2


def test_it_does_not_pay_for_a_node_that_is_a_little_slow_nor_shortly_before_the_end(run_dir):
    assert not ask(run_dir, times=1.2).pays
    assert not ask(run_dir, step=4995).pays
    assert not ask(run_dir, migration_s=1e5).pays


def test_seconds_are_those_measured(run_dir):
    """What is predicted to save 60 % of a step saves 60 % of a step that takes a hundred times as long."""
    assert not ask(run_dir, step=4900, migration_s=100.0, step_s=0.5).pays
    assert ask(run_dir, step=4900, migration_s=100.0, step_s=50.0).pays


def test_where_a_link_became_very_slow_fewer_nodes_or_messages_pay(run_dir):
    said = ask(run_dir, "slow_link", on=(4, 1), times=30.0)
    assert said.pays and said.plan != PLAN
    assert said.predicted_now_s > 3 * said.predicted_new_s
    assert not ask(run_dir, "slow_link", on=(4, 1), times=1.05).pays


def test_a_plan_that_sends_nothing_is_not_slow_for_its_links(run_dir):
    said = ask(run_dir, "slow_link", on=(1,), plan="precision=fp32,compile=false", times=3.0)
    assert not said.pays and "is not predicted to wait for any link" in said.why


STAGES = "pp=4,microbatch=4,precision=fp32,compile=false"


def test_layers_go_to_stages_that_are_fast(run_dir):
    asked = {"plan": STAGES, "on": (4,), "step_s": 12.0, "microbatches": 12}
    said = ask(run_dir, "uneven_stages", stage_s=(0.2, 0.6, 0.2, 0.2), **asked)
    layers = numbers_of(Plan.parse(said.plan).layers)
    assert said.pays and said.size == 4 and sum(layers) == 6 and layers[1] == 1
    assert said.predicted_now_s == 12.0 and said.predicted_new_s < 10.8
    alike = ask(run_dir, "uneven_stages", stage_s=(0.2, 0.21, 0.2, 0.2), **asked)
    assert not alike.pays
    assert not ask(run_dir, "uneven_stages", stage_s=(0.2, 0.6, 0.2, 0.2), step=4999, **asked).pays


def test_shares_that_ranks_have_come_to_stay(run_dir):
    plan = "pp=2,dp_replicate=2,microbatch=2,precision=fp32,compile=false"
    Plan.parse(f"{plan},shares=3:1").save(run_dir / "plan.toml")
    said = ask(run_dir, "uneven_stages", plan=plan, on=(4,), stage_s=(0.2, 0.8), microbatches=18, step_s=20.0)
    assert said.pays and Plan.parse(said.plan).shares == "3:1"


def test_a_stage_gets_no_more_layers_than_it_has_room_for(run_dir, monkeypatch):
    monkeypatch.setattr(heterogeneous, "room_for_layers", lambda costs, plan, memory_bytes: np.full(plan.pp, 2.0))
    said = ask(run_dir, "uneven_stages", plan=STAGES, on=(4,), stage_s=(0.2, 0.6, 0.1, 0.1), microbatches=12)
    assert max(numbers_of(Plan.parse(said.plan).layers or "1")) <= 2


def test_steps_left_of_a_run_in_minutes_that_has_no_number_yet_follow_from_its_speed():
    run = load(None, {"model.preset": "llama-5m", "train.steps": 0, "train.minutes": 10.0})
    assert steps_left(run, 5, 2.0) == 300
