"""Trials as an array job of SLURM, as far as it goes without a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from argosy.config.schema import RunConfig
from argosy.launch.engines.job import FOLDER
from argosy.sweep.executor import Asked, Needs, Task
from argosy.sweep.executors.slurm import SlurmTrials


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SLURM whose sbatch keeps the script as `sent`."""
    scripts = {"sbatch": f'cp "$2" {tmp_path}/sent; echo 7', "squeue": "true", "srun": 'echo "ran $*"'}
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_a_sweep_may_have_any_folder(slurm):
    folder = slurm / 'a "b" $(touch owned) 5%'
    run_dir = folder / "0000"
    (run_dir / FOLDER).mkdir(parents=True)
    task = Task(0, RunConfig(), run_dir, ("run.toml", "--run-dir", str(run_dir)), Needs(cores=1))
    (job,) = SlurmTrials(folder, "mine", 2, Asked(time="1:00")).start([task])
    assert job.id == "7_0" and Path(job.log) == run_dir / FOLDER / "slurm-7_0.out"
    sent = (slurm / "sent").read_text()
    assert "#SBATCH --output=/dev/null" in sent and "#SBATCH --array=0-0%2" in sent and "--time=1:00" in sent
    environment = {"PATH": f"{slurm}:/usr/bin:/bin", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    subprocess.run(["bash", slurm / "sent"], check=False, cwd=slurm, env={**environment, "SLURM_JOB_ID": "7"})
    assert "ran --ntasks-per-node=1" in Path(job.log).read_text()
    assert not list(slurm.rglob("owned"))
