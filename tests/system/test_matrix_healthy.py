"""The matrix of faults: a run that nobody disturbs is silent. `make healthy` lets it be so for an hour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import argosy
from commands import Folder
from matrix import STEADY
from waiting import PATIENT_S

SCRIPT = Path(argosy.__file__).parents[2] / "benchmarks/faults/healthy.py"


def healthy(folder: Folder, *options: str) -> subprocess.CompletedProcess[str]:
    folder.write_run(steps=100_000, every_steps=100)
    command = [sys.executable, str(SCRIPT), "run.toml", *STEADY, *options]
    return subprocess.run(command, cwd=folder.path, capture_output=True, text=True, check=False, timeout=PATIENT_S)


@pytest.mark.slow
def test_a_healthy_run_is_silent(folder: Folder) -> None:
    done = healthy(folder, "--minutes", "0.75")
    assert done.returncode == 0 and "silence: nothing was found wrong" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_in_which_something_happens_is_not(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGOSY_FAULTS", "kill@forward:step=5,rank=1")
    done = healthy(folder, "--minutes", "10", "--train.steps", "40")
    assert done.returncode == 1 and "worker_died" in done.stdout and "2 worlds" in done.stdout, done.stdout
