"""The batch job of a run, as far as it goes without a cluster."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.launch.engines.engine import LaunchRequest
from argosy.launch.engines.slurm import Slurm

REQUEST = LaunchRequest(RunConfig(name="mine"), Path("/shared/runs/mine"), ("run.toml",), Path("/shared"), nodes=2)


def lines(request: LaunchRequest) -> list[str]:
    return Slurm().script(request).splitlines()


def test_a_folder_is_what_it_is_called_in_all_lines():
    folder = Path("/shared/50% of 'my' \"runs\"/$HOME")
    said = lines(replace(REQUEST, run_dir=folder / "mine", work_dir=folder))
    (output,) = [line for line in said if line.startswith("#SBATCH --output=")]
    assert output == '#SBATCH --output="/shared/50%% of \'my\' \\"runs\\"/$HOME/mine/launch/slurm-%j.out"'
    assert f"cd {shlex.quote(str(folder))} || exit 2" in said
    words = shlex.split("\n".join(line for line in said if not line.startswith("#")))
    task = words[words.index("-c") + 1]
    assert f"--run-dir {shlex.quote(str(folder / 'mine'))}; code=$?" in task
    assert shlex.split(said[-1])[-2:] == [str(folder / "mine"), "$?"]


@pytest.mark.parametrize("name", ["a\nb", "a\\b"])
def test_a_folder_that_sbatch_cannot_be_told_is_refused_before_anything_is_made(name):
    with pytest.raises(UserError, match="cannot be given to sbatch"):
        Slurm().check(replace(REQUEST, run_dir=Path("/shared") / name))


def test_more_nodes_in_the_run_than_in_the_job_are_refused_before_it_waits():
    run = RunConfig.model_validate({"launch": {"nodes": 3}})
    with pytest.raises(UserError, match=r"launch\.nodes = 3, and --nodes 2\. Give --nodes 3 or more"):
        Slurm().check(replace(REQUEST, run=run))
    Slurm().check(replace(REQUEST, run=run, nodes=4))


def test_what_is_asked_for_is_in_the_job():
    said = lines(replace(REQUEST, gpus_per_node=8, time="1-00:00:00", extra=("--constraint=h100",)))
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --time=1-00:00:00", "#SBATCH --exclusive",
            "#SBATCH --signal=USR1@90", "#SBATCH --no-kill", "#SBATCH --constraint=h100"} <= set(said)  # fmt: skip
