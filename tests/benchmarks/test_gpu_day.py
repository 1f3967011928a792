"""The script of the first hour on a GPU: it refuses without one, and its stages do what they say, here on a CPU."""

from __future__ import annotations

import json
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu_day

STAGE_NAME = attrgetter("__name__")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py"])
    assert gpu_day.main() == 2
    assert "torch sees no GPU here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_it_stops_at_the_first_failure_and_keeps_what_was_said(tmp_path: Path) -> None:
    def good(day: gpu_day.Day) -> None:
        """Good."""
        day.run("good", ["true"])

    def bad(day: gpu_day.Day) -> None:
        """Bad."""
        day.run("bad", ["sh", "-c", "echo why; exit 3"])

    assert gpu_day.run_all([good, bad, good], gpu_day.Day(tmp_path, 1)) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: one["state"] for name, one in summary.items()} == {"good": "passed", "bad": "failed"}
    assert "exit code 3" in summary["bad"]["notes"][0]
    assert (tmp_path / "bad.txt").read_text().endswith("why\n")


def test_a_result_that_is_missing_fails_its_stage(tmp_path: Path) -> None:
    def reads(day: gpu_day.Day) -> None:
        """Reads."""
        (day.out / "report.json").read_text()

    assert gpu_day.run_all([reads], gpu_day.Day(tmp_path, 1)) == 1
    (outcome,) = json.loads((tmp_path / "summary.json").read_text()).values()
    assert outcome["state"] == "failed" and "report.json" in outcome["notes"][0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage for stage in gpu_day.STAGES if stage is not gpu_day.tests], ids=STAGE_NAME)
def test_stages_run(tmp_path: Path, stage: gpu_day.Stage) -> None:
    assert gpu_day.run_all([stage], gpu_day.Day(tmp_path, 2, is_rehearsal=True)) == 0
