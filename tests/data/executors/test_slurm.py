"""Workers as an array job of SLURM, as far as it goes without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.data.executors.executor import Program, WorkersRequest
from argosy.data.executors.slurm import SlurmExecutor


def executor(folder: Path, monkeypatch: pytest.MonkeyPatch, squeue: str) -> SlurmExecutor:
    """Workers of a SLURM whose sbatch gives number 7, and whose squeue is this script."""
    for name, text in {"sbatch": "echo 7", "squeue": squeue}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    request = WorkersRequest("prepare", Program("argosy.data.worker"), folder / "a b%", Path("/shared"), {"A": "b c"})
    request.folder.mkdir()
    return SlurmExecutor(request)


def test_a_folder_is_what_it_is_called(tmp_path, monkeypatch):
    said = executor(tmp_path, monkeypatch, "").script(2).splitlines()
    assert f'#SBATCH --output="{tmp_path}/a b%%/slurm-%A-%a.out"' in said
    assert "#SBATCH --array=0-1" in said and "export A='b c'" in said


def test_a_controller_that_is_away_ends_no_worker(tmp_path, monkeypatch):
    away = (
        'if [ -f "$0.away" ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi; echo "7 0 RUNNING None"'
    )
    workers = executor(tmp_path, monkeypatch, away)
    workers.start(1)
    assert workers.states() == {"slurm-7-0": ("running", "running")}
    (tmp_path / "squeue.away").touch()
    assert workers.states() == {"slurm-7-0": ("running", "running")}


def test_a_worker_that_slurm_no_longer_knows_has_ended(tmp_path, monkeypatch):
    workers = executor(tmp_path, monkeypatch, 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    workers.start(1)
    assert workers.states() == {"slurm-7-0": ("ended", "no longer known to SLURM")}
