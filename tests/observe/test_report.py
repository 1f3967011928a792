"""report.json: what a run came to."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from argosy.observe.report import Report, totals

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
    }


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
        **totals(STEPS),
    )
    report.save(tmp_path)
    assert Report.load(tmp_path) == report
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_half_a_report_is_none(tmp_path):
    (tmp_path / "report.json").write_text('{"name": "tiny"')
    with pytest.raises(ValidationError):
        Report.load(tmp_path)
