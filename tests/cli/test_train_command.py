"""`argosy train`: what it says when the run has ended."""

from __future__ import annotations

import shlex
import subprocess
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
        (["--train.objective", "sft"], "finished", "next: argosy chat 'my runs/a'\n"),
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


def test_the_command_that_is_named_next_can_be_typed_without_argosy_on_the_path(monkeypatch, tmp_path, capsys):
    """As in a job: it is started as `python -m argosy`, and no shell has set up a path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    report = SimpleNamespace(run_dir=tmp_path / "runs/a", status="finished")
    monkeypatch.setattr(local, "train", lambda *args, **options: report)
    train.main(["--name", "a"])
    words = shlex.split(capsys.readouterr().out.removeprefix("next: "))
    asked = subprocess.run(
        [*words[: words.index("generate") + 1], "--help"], capture_output=True, text=True, check=True
    )
    assert "argosy generate" in asked.stdout


def test_only_the_first_task_of_a_job_step_names_it(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    report = SimpleNamespace(run_dir=tmp_path / "runs/a", status="finished")
    monkeypatch.setattr(local, "train", lambda *args, **options: report)
    for name, value in {"STEP_NUM_TASKS": "2", "STEP_NUM_NODES": "2", "PROCID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    train.main(["--name", "a"])
    assert capsys.readouterr().out.startswith("next: ")
    monkeypatch.setenv("SLURM_PROCID", "1")
    train.main(["--name", "a"])
    assert not capsys.readouterr().out


def test_a_dry_run_of_a_finished_run_says_what_would_make_it_longer(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(local, "would_train", lambda *args: [])
    train.main(["--run-dir", str(tmp_path), "--dry-run"])
    assert capsys.readouterr().out.startswith(f"{tmp_path} is finished. More --train.steps")
