"""report.json: what a run came to."""

from __future__ import annotations

import math

import pytest

from argosy.errors import UserError
from argosy.observe.report import Report, SyncSavings, totals, typical, typical_bytes, typical_round_wait_s
from argosy.plan.calibration import ComparedFigure, Reconciled

STEPS = [
    {
        "step": step,
        "tokens": 100 * (step + 1),
        "loss": 5.0 - step,
        "step_time_s": seconds,
        "tokens_per_s": 100 / seconds,
        "mfu": 0.1 / seconds,
        "memory_bytes": 1000 + (step == 1),
        "seconds": {"forward": seconds / 2, "other": seconds / 2, "step": seconds} | extra,
    }
    for step, (seconds, extra) in enumerate([(10.0, {}), (1.0, {"evaluate": 0.25}), (0.5, {})])
]

PREDICTED = Reconciled(
    cluster="here",
    seconds={"rest": ComparedFigure(predicted=1.0, measured=2.0)},
    step_s=ComparedFigure(predicted=1.0, measured=2.0, low=0.5, high=2.0),
    memory_bytes=ComparedFigure(predicted=1e6, measured=2e6, low=5e5, high=2e6),
)


def test_totals_are_of_all_steps_and_speeds_those_of_the_middle_one():
    assert totals(STEPS) == {
        "steps": 3,
        "tokens": 300,
        "loss": 3.0,
        "step_time_s": 1.0,
        "tokens_per_s": 100.0,
        "mfu": 0.1,
        "memory_bytes": 1001,
        "seconds": {"forward": 5.75, "other": 5.75, "step": 11.5, "evaluate": 0.25},
        "sync": None,
    }


def test_steps_count_where_their_lines_are_lost():
    found = totals(STEPS[1:])
    assert found is not None and found["steps"] == 3


def test_speeds_of_a_batch_size_ramp_are_those_of_its_largest_batch():
    found, last = totals(STEPS, lambda step: 4 if step < 2 else 8), STEPS[2]
    assert found is not None
    assert [found[key] for key in ("steps", "tokens", "step_time_s", "mfu")] == [3, 300, 0.5, last["mfu"]]
    stopped = totals(STEPS[:2], lambda step: 4 if step < 1 else 8)
    assert stopped is not None and (stopped["steps"], stopped["step_time_s"]) == (2, 1.0)


def test_speeds_are_those_of_the_last_plan_and_of_the_one_before_while_it_has_no_step():
    for since, step_s in ((1, 0.75), (2, 0.5), (3, 1.0)):
        found = totals(STEPS, plan_since=since)
        assert found is not None and (found["steps"], found["step_time_s"]) == (3, step_s)


def test_a_report_says_what_replicas_sent_to_agree():
    tables = [{"bytes": 100, "seconds": 0.5, "ratio": 0.25}, {"bytes": 300, "seconds": 1.0, "ratio": 0.75}]
    tables[1] |= {"staleness": 10, "distance": 0.5}
    found = totals([step | {"sync": table} for step, table in zip(STEPS, tables, strict=False)] + STEPS[2:])
    assert found["sync"] == SyncSavings(sent_bytes=400, ratio=0.5, seconds=1.5, staleness=10, distance=0.5)
    words = report(**found).in_words()
    assert "between replicas: 0.0 MB sent, 0.5 of the bytes of exact fp32 sums; waited" in words


def test_bytes_of_a_typical_step_are_the_middle_of_all_but_the_first():
    steps = [{"communication": {"replicate": {"node": [0.1, sent]}}} for sent in (9, 5, 900, 5)]
    assert typical_bytes(steps) == {"replicate": 5}


def test_bytes_of_rounds_are_the_mean_over_their_steps():
    rounds = [{"sites": {"sent_bytes": sent, "staleness_steps": 10}} for sent in (100, 300)]
    assert typical_bytes([{}, rounds[0], {}, rounds[1]]) == {"sites": 20.0}


def test_figures_between_two_steps_are_as_short_as_those_of_a_step():
    steps = [STEPS[0] | {"mfu": mfu, "tokens_per_s": 100.1 + mfu, "step_time_s": mfu} for mfu in (0.1232, 0.1236)]
    found = totals(steps)
    assert (found["mfu"], found["tokens_per_s"], found["step_time_s"]) == (0.1234, 100.2, 0.1234)


def test_no_run_computes_faster_than_the_peak():
    found = totals([step | {"mfu": 1.26} for step in STEPS])
    assert found["mfu"] is None
    assert "MFU n/a" in report(**found).in_words()


def test_time_in_which_a_run_was_stopped_is_told_apart():
    words = report(wall_s=697.0, **totals(STEPS)).in_words()
    assert words.startswith("done: 3 steps, 0.00M tokens in 0:12 of steps (11:37 since the first start)\n")
    assert max(map(len, words.splitlines())) <= 80


def test_counts_stay_whole_numbers(tmp_path):
    report(validation={"loss": 4.5, "tokens": 65536}, **totals(STEPS)).save(tmp_path)
    assert '"tokens": 65536\n' in (tmp_path / "report.json").read_text()


def report(**facts):
    given = {"wall_s": 20.0, "time_to_first_step_s": 2.5, "validation": None, "sample": None} | facts
    return Report(
        name="tiny", run_dir="r", status="finished", plan="microbatch=1", peak_flops=1e9, goodput=0.5, **given
    )


def test_a_typical_step_is_the_middle_half_without_what_comes_now_and_then():
    steps = [
        {
            "step_time_s": seconds,
            "seconds": {"forward": seconds / 2, "other": seconds / 2, "check": 9.0, "evaluate": 9.0, "step": 9.0},
        }
        for seconds in (30.0, 1.0, 8.0, 2.0, 3.0)  # the first one compiles
    ]
    assert typical(steps) == {"forward": 1.25, "other": 1.25}
    assert typical(steps[:1]) == {"forward": 15.0, "other": 15.0}


@pytest.mark.parametrize("validation", [None, {"loss": 4.5}, {"loss": 900.0, "perplexity": math.inf}])
@pytest.mark.parametrize("first_s", [None, 2.5])
def test_a_report_survives_being_saved(tmp_path, validation, first_s):
    report = Report(
        name="tiny",
        run_dir=tmp_path,
        status="finished",
        plan="microbatch=1",
        peak_flops=1e9,
        time_to_first_step_s=first_s,
        wall_s=20.0,
        goodput=0.5,
        validation=validation,
        sample="def \N{GREEK SMALL LETTER ALPHA}\n",
        predicted=PREDICTED,
        **totals(STEPS),
    )
    report.save(tmp_path)
    assert Report.load(tmp_path) == report
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_run_ends_with_how_wrong_its_prediction_was(tmp_path):
    facts = {"status": "finished", "plan": "microbatch=1", "peak_flops": 1e9, "wall_s": 20.0, "goodput": 0.5}
    report = Report(
        name="tiny", run_dir=tmp_path, time_to_first_step_s=None, validation=None, sample=None, **facts, **totals(STEPS)
    )
    assert "predicted" not in report.in_words()
    words = report.model_copy(update={"predicted": PREDICTED}).in_words()
    assert words.endswith(PREDICTED.in_words())


def test_the_wait_of_a_typical_round_is_that_in_the_middle() -> None:
    waits = [{"sites": {"seconds": each}} for each in (1.0, 90.0, 2.0)]
    assert typical_round_wait_s([{"step": 1}, *waits]) == 2.0
    assert typical_round_wait_s([{"step": 1}]) is None


def test_a_notebook_shows_a_report_as_a_table():
    page = report(**totals(STEPS) | {"sample": "if a < b:"})._repr_html_()
    assert "tiny, finished after 3 steps" in page
    assert "3.0000" in page
    assert "if a &lt; b:" in page
    assert page.count("<tr>") == page.count("</tr>") == 9
    scored = {"validation": {"loss": 0.5, "accuracy": 0.7}}
    assert "70.0% of pairs" in report(**totals(STEPS) | scored)._repr_html_()


@pytest.mark.parametrize("text", ['{"name": "tiny"', "{}", '{"predicted": -Infinity}'])
def test_a_report_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match=r"report\.json: .*Remove it: "):
        Report.load(tmp_path)
