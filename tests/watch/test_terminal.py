"""Runs in a terminal, from their folders."""

from __future__ import annotations

import os
import pty
import select
import sys
import termios
from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.observe.events import JsonLines
from argosy.watch import terminal


def made(folder: Path, name: str, ended: bool = False) -> Path:
    run = folder / name
    for step in range(3):
        JsonLines(run / "metrics.jsonl").write({
            "step": step, "loss": 3.0, "tokens": 100, "tokens_per_s": 10.0, "mfu": 0.5, "step_time_s": 0.1,
            "memory_bytes": 1e6, "seconds": {"forward": 0.1, "step": 0.1},
        })  # fmt: skip
    (run / "run.toml").write_text(f'name = "{name}"\n[train]\nsteps = 3\n')
    if ended:
        (run / "report.json").write_text("{}")
    return run


def test_without_a_terminal_each_run_is_a_line(tmp_path, capsys):
    made(tmp_path, "first", ended=True)
    made(tmp_path, "second")
    assert terminal.main(tmp_path) == 0
    first, second = sorted(capsys.readouterr().out.splitlines())
    assert first.startswith("first step     3/3  ended  loss 3.000") and second.startswith("second step     3/3  loss")


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        terminal.main(tmp_path)


def test_a_run_that_has_written_nothing_for_long_is_said_to_be_silent(tmp_path):
    run = made(tmp_path, "old")
    os.utime(run / "metrics.jsonl", (1, 1))
    assert terminal.seen(terminal.FolderView(run), run).doing.startswith("silent for")


def test_a_run_without_a_report_that_has_ended_is_not_silent(tmp_path):
    run = made(tmp_path, "served")
    os.utime(run / "metrics.jsonl", (1, 1))
    JsonLines(run / "events/server-1.jsonl").write({"time_s": 2.0, "event": "finish", "exit_code": 0, "finished": True})
    assert terminal.seen(terminal.FolderView(run), run).doing == "finished"


def test_keys_choose_the_run_and_the_terminal_is_as_it_was(tmp_path, monkeypatch):
    for name in ("first", "second"):
        made(tmp_path, name)
    main, end = pty.openpty()
    before = termios.tcgetattr(end)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    with open(end, "r+b", buffering=0, closefd=False) as raw:
        out = os.fdopen(os.dup(end), "w", encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", raw)
        monkeypatch.setattr(sys, "stdout", out)
        keys = iter(["", "\x1b[B", "", "q"])
        monkeypatch.setattr(terminal, "_typed", lambda _: next(keys))
        assert terminal.main(tmp_path) == 0
    shown = ""
    while select.select([main], [], [], 0.5)[0]:  # a terminal gives out a part at a time
        shown += os.read(main, 1 << 16).decode(errors="replace")
    assert "first (1 of 2)" in shown and "second (2 of 2)" in shown
    assert termios.tcgetattr(end) == before
