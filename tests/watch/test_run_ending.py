"""A run that has finished ends in its status, above its report, whatever its folder holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.observe.report import Report
from argosy.watch.status import ending_in_words
from run_folder import RunFolder

REPORT = Report(
    name="tiny", run_dir=Path("runs/tiny"), status="finished", plan="microbatch=1", steps=3, tokens=300, loss=3.0,
    step_time_s=1.0, tokens_per_s=100.0, mfu=0.1, peak_flops=1e9, time_to_first_step_s=None, memory_bytes=1000,
    seconds={"step": 3.0}, wall_s=5.0, goodput=0.6, validation=None, sample=None,
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "tiny")
    made.event("start", step=0, world_size=1)
    made.step(0, 1, 2, loss=3.0)
    made.event("finish", finished=True)
    return made


def test_the_status_heads_the_report(run: RunFolder) -> None:
    lines = ending_in_words(run.path, REPORT).splitlines()
    assert lines[0].startswith("tiny: finished, step 3") and any(line.startswith("done: 3 steps") for line in lines[3:])
    assert not any("next:" in line or "argosy generate" in line for line in lines)  # the command says that at its end


def test_a_status_that_fails_does_not_fail_the_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.watch.status.status_of", lambda reader: 1 / 0)
    assert ending_in_words(run.path, REPORT).splitlines()[:1] == ["no status: ZeroDivisionError: division by zero"]
