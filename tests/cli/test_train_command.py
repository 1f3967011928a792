"""`argosy train`: what it says when the run has ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from argosy.cli import train
from argosy.launch import local


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--evaluate.sample-prompt", "def "], "finished", "next: argosy generate 'my runs/a' --prompt 'def '\n"),
        (["--evaluate.sample-prompt", "def "], "stopped", ""),
        ([], "finished", "next:\n  argosy generate "),
    ],
)
def test_a_run_that_is_trained_ends_with_what_to_do_next(monkeypatch, tmp_path, capsys, options, status, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.shutil, "which", lambda name: name)
    report = SimpleNamespace(run_dir=Path("my runs/a").absolute(), status=status)
    monkeypatch.setattr(local, "train", lambda *args, **options: report)
    train.main(options)
    out = capsys.readouterr().out
    assert out.startswith(said) if said else not out
