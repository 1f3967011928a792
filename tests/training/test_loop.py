"""The promises of the main loop: the same numbers on any mesh, and after any stop."""

from __future__ import annotations

import re
from statistics import median
from typing import Any

import pytest

from argosy.checkpoint import store
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import RunFailed
from argosy.observe.events import plan_since, read_lines
from argosy.observe.report import Report
from argosy.parallel.world import World
from argosy.plan.cost.prediction import Prediction
from argosy.plan.plan import Plan
from argosy.training.loop import train
from argosy.training.state import Survivor
from argosy.training.stop import WorldIsOver
from tiny import EAGER, OverAfter, eager, losses, prepare_corpus, run_config, train_in, weights

ALONE = World()


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory) -> list[dict[str, Any]]:
    """The records of one process that nothing stopped."""
    return train_in(ALONE, run_config(corpus), EAGER, tmp_path_factory.mktemp("reference"))


def saving(corpus, **checkpoint: Any) -> RunConfig:
    return run_config(corpus, checkpoint={"every_steps": 2, **checkpoint})


def test_the_loss_falls(reference):
    assert len(losses(reference)) == 8
    assert losses(reference)[-1] < losses(reference)[0] - 0.3


@pytest.mark.parametrize(
    "plan",
    [
        "microbatch=8",
        pytest.param("dp_replicate=2", marks=pytest.mark.slow),
        "dp_replicate=2,microbatch=4",
        pytest.param("dp_replicate=4", marks=pytest.mark.slow),
    ],
)
def test_every_plan_gives_the_losses_of_one_process(workers, corpus, reference, tmp_path, plan):
    records = workers.run(eager(plan).world_size, train_in, run_config(corpus), eager(plan), tmp_path)[0]
    assert losses(records) == pytest.approx(losses(reference), rel=1e-5)
    assert _validations(records) == pytest.approx(_validations(reference), rel=1e-5)


@pytest.mark.parametrize("stop_after", [1, pytest.param(3, marks=pytest.mark.slow), 7, 8])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(corpus, reference, tmp_path, stop_after):
    run = run_config(corpus)
    assert len(losses(train_in(ALONE, run, EAGER, tmp_path, stop_after))) == stop_after
    assert _numbers(train_in(ALONE, run, EAGER, tmp_path)) == _numbers(reference)


@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_a_run_that_died_between_saves_repeats_the_lost_steps_bit_for_bit(corpus, reference, tmp_path, background):
    run = saving(corpus, background=background)
    train_in(ALONE, run, EAGER, tmp_path, stop_after=5)
    store.remove(store.step_folder(tmp_path, 5))  # which one that dies does not write
    assert _numbers(train_in(ALONE, run, EAGER, tmp_path)) == _numbers(reference)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_processes(workers, corpus, reference, tmp_path, before, after):
    run = run_config(corpus)
    workers.run(before, train_in, run, eager(f"dp_replicate={before}"), tmp_path, 3)
    records = workers.run(after, train_in, run, eager(f"dp_replicate={after}"), tmp_path)[0]
    assert losses(records) == pytest.approx(losses(reference), rel=1e-5)


def test_a_stop_asked_of_one_process_stops_all_and_is_reported(workers, corpus, tmp_path):
    run = run_config(corpus)
    workers.run(2, stop_the_second, run, tmp_path)
    assert store.newest_whole(tmp_path).checkpoint.step == 3
    report = Report.load(tmp_path)
    assert (report.status, report.steps, report.tokens) == ("stopped", 3, 3 * 8 * 32)


def stop_the_second(world: World, run: RunConfig, run_dir) -> None:
    train_in(world, run, eager("dp_replicate=2"), run_dir, 3 if world.rank == 1 else None)


def test_a_finished_run_that_is_started_again_only_reports_again(corpus, reference, tmp_path):
    run = run_config(corpus)
    train_in(ALONE, run, EAGER, tmp_path)
    first = Report.load(tmp_path)
    assert _numbers(train_in(ALONE, run, EAGER, tmp_path)) == _numbers(reference)
    again = Report.load(tmp_path)
    assert (again.status, again.steps, again.loss) == ("finished", 8, first.loss)
    assert again.validation == pytest.approx(first.validation)


def test_a_finished_run_can_be_made_longer(corpus, tmp_path):
    constant = {"kind": "constant"}
    half = run_config(corpus, train={"steps": 4}, schedule=constant)
    whole = run_config(corpus, schedule=constant)
    train_in(ALONE, half, EAGER, tmp_path / "in two")
    in_two = losses(train_in(ALONE, whole, EAGER, tmp_path / "in two"))
    assert in_two == losses(train_in(ALONE, whole, EAGER, tmp_path / "in one"))


def test_other_weights_than_the_initial_ones_are_where_a_run_starts(corpus, reference, tmp_path):
    train_in(ALONE, run_config(corpus), EAGER, tmp_path / "first")
    start = {"weights": tmp_path / "first"}
    records = train_in(ALONE, run_config(corpus, model=start, train={"steps": 1}), EAGER, tmp_path / "second")
    assert [record["step"] for record in records if "loss" in record] == [0]
    assert losses(records)[0] < losses(reference)[0] - 0.3


def test_every_second_of_a_step_is_accounted_for(reference):
    for record in reference:
        if "seconds" in record:
            parts = sum(seconds for category, seconds in record["seconds"].items() if category != "step")
            assert parts == pytest.approx(record["seconds"]["step"], abs=1e-4)


def test_a_budget_of_minutes_is_filled_at_the_speed_of_warmup_and_leaves_its_length_in_run_toml(corpus, tmp_path):
    budget_s, warmup = 1.5, 6
    minutes = {"steps": 0, "minutes": budget_s / 60}
    run = run_config(corpus, train=minutes, schedule={"warmup_steps": warmup}, evaluate={"every_steps": 0})
    records = [record for record in train_in(ALONE, run, EAGER, tmp_path) if "loss" in record]
    events = read_lines(tmp_path / "events/rank-0.jsonl")
    (begun,) = [event for event in events if event["event"] == "start"]
    (length,) = [event for event in events if event["event"] == "length"]
    assert load(tmp_path / "run.toml").train.steps == length["steps"] == len(records) > warmup
    # How fast the steps after those were, and so when it ended, is for the machine to say.
    left_s = budget_s - (length["time_s"] - begun["time_s"])
    step_s = median(record["seconds"]["step"] for record in records[:warmup])
    assert 0.2 < (len(records) - warmup) / max(1, left_s / step_s) < 5


def test_a_budget_of_minutes_counts_the_steps_of_worlds_that_ended_before_it_became_steps(corpus, tmp_path):
    minutes = {"steps": 0, "minutes": 60}
    run = run_config(corpus, train=minutes, schedule={"warmup_steps": 5}, evaluate={"every_steps": 0})
    survivor, lines = Survivor(), tmp_path / "metrics.jsonl"
    with pytest.raises(WorldIsOver):
        train(run, EAGER, ALONE, tmp_path, OverAfter(3), survivor)
    lines.write_text(re.sub(r'"step": 0\.\d+}', '"step": 3600.0}', lines.read_text(), count=1))
    assert train(run, EAGER, ALONE, tmp_path, OverAfter(8), survivor)  # else it would go on for an hour
    assert load(tmp_path / "run.toml").train.steps == 6


def test_steps_that_are_not_finite_end_the_run_before_they_touch_the_weights(corpus, tmp_path):
    # A save that is in flight when the run fails is abandoned: in the background it might not be there in time.
    saves = {"every_steps": 1, "background": False}
    run = run_config(corpus, optimizer={"lr": 1e30, "grad_clip": 0.0}, checkpoint=saves)
    with pytest.raises(RunFailed, match="not finite"):
        train_in(ALONE, run, EAGER, tmp_path)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())
    assert any(event["event"] == "bad_step" for event in read_lines(tmp_path / "events/rank-0.jsonl"))


def test_a_corpus_without_held_out_text_trains_and_reports_no_validation(tmp_path):
    corpus = prepare_corpus(tmp_path / "corpus", validation_fraction=0.0)
    assert len(losses(train_in(ALONE, run_config(corpus), EAGER, tmp_path / "run"))) == 8
    assert Report.load(tmp_path / "run").validation is None


def test_an_empty_prompt_asks_for_no_sample(corpus, tmp_path):
    train_in(ALONE, run_config(corpus, evaluate={"sample_prompt": ""}), EAGER, tmp_path)
    assert Report.load(tmp_path).sample is None


def test_the_report_says_what_the_run_came_to(corpus, tmp_path):
    prompt = "def "
    records = train_in(ALONE, run_config(corpus, evaluate={"sample_prompt": prompt}), EAGER, tmp_path)
    report = Report.load(tmp_path)
    assert (report.status, report.steps, report.loss) == ("finished", 8, losses(records)[-1])
    assert report.validation["loss"] == _validations(records)[-1]
    assert report.sample.startswith(prompt)
    assert 0 < report.goodput <= 1


def _validations(records: list[dict[str, Any]]) -> list[float]:
    return [record["validation_loss"] for record in records if "validation_loss" in record]


def _numbers(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What a run computes, without what it measures. An evaluation that a signal interrupted comes after its step's
    line, any other before it."""
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "validation_loss", "bits_per_byte")
    in_order = sorted(records, key=lambda record: (record["step"], "loss" in record))
    return [tuple(record.get(key) for key in keys) for record in in_order]


@pytest.mark.parametrize("plan", ["microbatch=8", "dp_replicate=2", "pp=2,microbatch=2"])
def test_a_run_says_how_wrong_its_prediction_was(workers, corpus, tmp_path, plan):
    workers.run(eager(plan).world_size, train_in, run_config(corpus), eager(plan), tmp_path)
    report, prediction = Report.load(tmp_path), Prediction.load(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == eager(plan)
    assert report.predicted.step_s.predicted == pytest.approx(prediction.step_s.mid, rel=1e-4)
    for side in ("predicted", "measured"):
        parts = [getattr(part, side) for part in report.predicted.seconds.values()]
        assert sum(parts) == pytest.approx(getattr(report.predicted.step_s, side))
    assert report.predicted.seconds["forward_backward"].measured > 0
    assert 0 < report.memory_before_bytes <= report.memory_bytes
    assert (report.device, report.software[:6]) == ("cpu", "torch ")


def test_only_the_steps_of_the_last_plan_are_held_against_its_prediction(workers, corpus, tmp_path):
    run = run_config(corpus)
    workers.run(1, train_in, run, EAGER, tmp_path, 3)
    workers.run(2, train_in, run, eager("dp_replicate=2"), tmp_path)
    assert plan_since(e for e in read_lines(tmp_path / "events" / "rank-0.jsonl") if e["event"] == "start") == 3
