"""What srun says of a job step takes the place of keys that the run file leaves out."""

from __future__ import annotations

import pytest

from argosy.config.launch import LaunchConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.launch.slurm import with_slurm


def step(nodes: int, tasks: int | None = None) -> dict[str, str]:
    tasks = nodes if tasks is None else tasks
    return {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes), "SLURMD_NODENAME": "n7"}


def launch(environment: dict[str, str], **given: object) -> LaunchConfig:
    return with_slurm(RunConfig(launch=LaunchConfig(**given)), environment).launch  # type: ignore[arg-type]


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NNODES": "4"}, step(1)])
def test_one_node_or_a_batch_script_is_a_machine_like_any_other(environment):
    assert launch(environment) == LaunchConfig()


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({}, {"nodes": 4, "node": "n7", "lease": "folder"}),
        ({"nodes": 3}, {"nodes": 3, "node": "n7", "lease": "folder"}),
        ({"node": "n1"}, {"nodes": 4, "node": "n7", "lease": "folder"}),
        ({"coordinator": "n1:29400"}, {"nodes": 4, "node": "n7", "coordinator": "n1:29400"}),
        ({"lease": "etcd://h1:2379"}, {"nodes": 4, "node": "n7", "lease": "etcd://h1:2379"}),
    ],
)
def test_the_nodes_are_those_of_the_step(given, made):
    assert launch(step(4), **given) == LaunchConfig(**made)


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(UserError, match=r"8 tasks on 4 nodes.*--ntasks-per-node=1"):
        launch(step(4, tasks=8))
    with pytest.raises(UserError, match=r"launch\.nodes = 8, and srun has started 4.*--nodes=8"):
        launch(step(4), nodes=8)
