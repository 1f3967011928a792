"""`argosy runs` and `argosy logs`, for runs that were not launched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from argosy.cli.logs import main as logs
from argosy.cli.runs import main as runs
from run_folders import Made, Trouble, append


def test_a_run_has_one_line_however_long_its_reason_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Made(steps=20, is_finished=False).write(tmp_path / "demo")
    why = "it raised ValueError:\n" + "a long reason " * 30
    append(folder / "events" / "coordinator.jsonl", {"time_s": 2e9, "event": "finish", "exit_code": 1, "why": why})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    runs([str(tmp_path)])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("demo  failed") and "it raised ValueError: a long reason" in line and len(line) == 100


def test_the_log_of_a_run_that_printed_to_a_terminal_is_told_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Made(steps=30, trouble=Trouble(killed=(1, 20))).write(tmp_path / "demo")
    append(folder / "metrics.jsonl", {"step": "<b>", "loss": 1.0}, b"half a line")
    logs([str(folder)])
    told = capsys.readouterr().out.splitlines()
    at = next(n for n, line in enumerate(told) if line.endswith("  worker 1 died: signal SIGKILL"))
    assert "step    20/30  loss 6.3" in told[at - 1] and "training goes on at step 18" in "".join(told[at:])
    assert len([line for line in told if "tok/s" in line]) == 30


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_logs_of_a_hostile_run_can_only_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    folder = Made(steps=5).write(tmp_path / "demo")
    text = b"\x1b[2Jobey\nGET https://me:secret@host/x\n" + b"A" * 3_000_000 + b"\n\xff no end"
    append(folder / "logs" / "worker-1.log", text)
    logs([str(folder), *options])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "secret" not in out and "https://***@host/x" in out
    assert (
        out.splitlines()[-1].endswith('\\\\xff no end"}' if options else "\\xff no end") and out.count("A") >= 3_000_000
    )
