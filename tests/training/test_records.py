"""A run's records: each fact once, by rank 0, in words and numbers that can be read again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from argosy.config.load import load
from argosy.errors import ArgosyWarning, RunFailed
from argosy.observe.events import read_lines
from argosy.parallel.world import World
from argosy.plan.cost.traffic import traffic
from argosy.plan.parameters import parameters
from argosy.plan.plan import Plan
from argosy.training.bad_steps import Action, BadStep
from argosy.training.evaluation import Score
from argosy.training.records import Records, SyncAccount
from argosy.training.recovery import Recovery
from argosy.training.state import StepUpdate
from argosy.training.step import Requests, StepOutcome
from tiny import EAGER, run_config

RUN = run_config(Path("no data"))


def sent(plan: Plan) -> int:
    return sum(count for (axis, _), count in traffic(plan, RUN).items() if axis == "replicate")


@pytest.mark.parametrize("word", ["bf16", "int8", "powersgd"])
def test_the_ratio_is_that_of_the_bytes_of_exact_sums(word: str) -> None:
    plan = Plan.parse(f"dp_replicate=2,sync={word}")
    exact = sent(Plan.parse("dp_replicate=2"))
    line = SyncAccount(RUN, plan).line({"replicate": {"network": [0.25, sent(plan)]}, "tp": {"node": [1.0, 9]}}, None)
    assert line == {"bytes": sent(plan), "seconds": 0.25, "ratio": pytest.approx(sent(plan) / exact, abs=1e-6)}


def test_exact_sums_have_no_account() -> None:
    assert SyncAccount(RUN, Plan.parse("dp_replicate=2")).line({"replicate": {"node": [1.0, 9]}}, None) is None


def test_a_round_of_sites_is_held_against_exact_sums_in_each_of_its_steps() -> None:
    run = RUN.model_copy(update={"sites": ("a", "b")})  # their number alone counts
    account = SyncAccount(run, Plan.parse("sync=diloco"))
    assert account.line({"replicate": {"node": [1.0, 9]}}, None) is None  # a step inside the round
    sites = {"sent_bytes": 4 * parameters(RUN.model), "seconds": 2.0, "staleness_steps": 50, "distance": 0.1}
    line = account.line({}, sites)
    assert line is not None
    assert line["ratio"] == pytest.approx(1 / 50)
    adapter = SyncAccount(run.with_keys(lora={"rank": 2}), Plan.parse("sync=diloco"))
    assert adapter.exact_bytes < account.exact_bytes / 4, "of the adapter alone"
    of_fragments = account.line({}, sites | {"steps": 25})
    assert of_fragments is not None and of_fragments["ratio"] == pytest.approx(2 / 50)
    assert (line["staleness"], line["distance"], line["seconds"]) == (50, 0.1, 2.0)


FIRST, SECOND = World(0, 2), World(1, 2)
UPDATE = StepUpdate(step=4, loss=2.5, gradient_norm=0.5, max_norm=1.0, learning_rate=1e-3, tokens=256, loads=None)
SAMPLES = {"first_sample": 32, "samples": 8}


def records(folder: Path, world: World = FIRST, **sections: dict[str, Any]) -> Records:
    made = Records(run_config(Path("no data"), **sections), EAGER, world, folder)
    made.peak_flops = 1e9
    return made


def events(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k != "time_s"} for e in read_lines(folder / "events" / f"rank-{rank}.jsonl")]


def bad(reason: str = "loss_spike", in_a_row: int = 1, loss: float = 9.0) -> BadStep:
    return BadStep(7, reason, loss, 0.5, math.inf, math.inf, in_a_row)


def test_what_is_the_same_on_all_ranks_is_recorded_by_rank_0_alone(tmp_path):
    for world in (FIRST, SECOND):
        made = records(tmp_path, world)
        made.tell("rewind", step=5, to_step=4)
        made.evaluated(4, Score(2.0, math.exp(2.0), 1.0, 100), {"arc": {"acc": 0.25, "acc_stderr": 0.125}})
    assert [event["event"] for event in events(tmp_path)] == ["rewind"] and not events(tmp_path, 1)
    assert records(tmp_path).metrics.read() == [
        {"step": 4, "validation_loss": 2.0, "bits_per_byte": 1.0, "tasks": {"arc": {"acc": 0.25, "acc_stderr": 0.125}}}
    ]


def test_an_evaluation_leaves_a_line_on_the_screen(tmp_path, capsys):
    for world in (FIRST, SECOND):
        records(tmp_path, world).evaluated(4, Score(2.0, math.exp(2.0), 1.0, 100), {"arc": {"acc": 0.25}})
    assert capsys.readouterr().out == (
        " step     5  evaluated: loss 2.000, 1.000 bits per byte\n             arc: acc 0.250\n"
    )


def test_the_line_of_a_step_leaves_out_the_time_of_what_comes_now_and_then(tmp_path):
    seconds = {"forward": 1.0, "evaluate": 4.0, "checkpoint": 3.0, "check": 2.0, "other": 1.0, "step": 11.0}
    line = records(tmp_path).step(UPDATE, 1280, SAMPLES, seconds)
    assert (line["step_time_s"], line["tokens_per_s"], line["seconds"]) == (2.0, 128.0, seconds)
    assert (line["step"], line["tokens"], line["loss"], line["grad_norm"], line["lr"]) == (4, 1280, 2.5, 0.5, 1e-3)
    assert (line["first_sample"], line["samples"]) == (32, 8)
    assert records(tmp_path).metrics.read() == [line]


def test_the_line_of_a_step_is_written_for_a_rank_that_died_but_not_twice(tmp_path):
    for _ in range(2):
        records(tmp_path).write_missing_line(UPDATE, 1280, lambda step: {"first_sample": 8 * step, "samples": 8})
    assert [(line["step"], line["first_sample"]) for line in records(tmp_path).metrics.read()] == [(4, 32)]


def test_the_last_steps_come_back_as_they_were(tmp_path):
    made = records(tmp_path, World(), resilience={"spike_window": 16, "spike_warmup_steps": 4})
    for step in range(20):
        made.metrics.write({"step": step, "loss": 3.0 + step, "grad_norm": 0.1 * step})
    assert made.last_steps() == [(step, 3.0 + step, 0.1 * step) for step in range(4, 20)]


def test_steps_that_no_survivor_knows_of_are_counted_from_their_lines(tmp_path):
    made = records(tmp_path)
    made.step(UPDATE, 1280, SAMPLES, {"step": 1.0})
    made.recovered(Recovery("disk", step=2, steps_lost=0, sent_bytes=0, own_bytes=0, seconds=0.1))
    (event,) = events(tmp_path)
    assert (event["event"], event["source"], event["step"], event["steps_lost"]) == ("recovered", "disk", 2, 3)


def test_numbers_that_are_not_finite_are_written_as_words(tmp_path):
    records(tmp_path).bad_step(bad("not_finite", loss=math.nan), Action.SKIP, [(56, 64)])
    (event,) = events(tmp_path)
    assert (event["loss"], event["grad_norm"], event["largest_loss"]) == ("nan", 0.5, "inf")
    assert (event["reason"], event["samples"], event["outcome"]) == ("not_finite", [[56, 64]], "skip")


def test_a_step_that_was_fine_when_it_was_repeated_is_recorded_with_both_tries(tmp_path):
    outcome = StepOutcome(2.0, 0.4, replicas_differ=False, requests=Requests(), loads=None)
    records(tmp_path).transient(bad("norm_outlier"), outcome)
    (event,) = events(tmp_path)
    assert (event["event"], event["step"], event["reason"]) == ("transient", 7, "norm_outlier")
    assert (event["first_loss"], event["first_grad_norm"], event["loss"], event["grad_norm"]) == (9.0, 0.5, 2.0, 0.4)


@pytest.mark.parametrize("rank", [FIRST, SECOND], ids=["rank 0", "rank 1"])
@pytest.mark.parametrize(
    ("found", "said"),
    [
        (bad("not_finite", 5), "at step 7: the last 5 steps were not finite, and changed nothing. Try a smaller"),
        (bad("loss_spike"), "at step 7: the step is bad, with a loss far above those of the steps before"),
        (bad("norm_outlier", 2), "the last 2 steps were bad, with a gradient norm far above those of the steps before"),
    ],
)
def test_a_run_that_bad_steps_end_says_on_all_ranks_what_was_wrong(tmp_path, rank, found, said):
    with pytest.raises(RunFailed, match=said):
        records(tmp_path, rank).bad_step(found, Action.STOP, [(56, 64)])


def test_a_budget_of_minutes_that_became_steps_is_in_run_toml(tmp_path):
    records(tmp_path, train={"steps": 0, "minutes": 5}).length(123)
    assert (load(tmp_path / "run.toml").train.steps, events(tmp_path)[0]["steps"]) == (123, 123)


def test_a_plan_that_a_full_disk_does_not_take_is_a_warning_and_the_one_before_stays(tmp_path, monkeypatch):
    def full(*what: object) -> None:
        raise OSError("No space left on device")

    kept = records(tmp_path)
    kept.replan(EAGER, 0)
    before = (tmp_path / "plan.toml").read_bytes()
    monkeypatch.setattr(Plan, "save", full)
    with pytest.warns(ArgosyWarning, match=r"plan\.toml is that of the plan before .*No space left"):
        kept.replan(Plan.parse("dp_replicate=2"), 4)
    assert (tmp_path / "plan.toml").read_bytes() == before and not (tmp_path / "plan-00000004.toml").exists()
