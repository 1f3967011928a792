"""Nodes that srun has started: what SLURM says of the job step stands in for keys that the run file leaves out.

srun starts one agent on each node, which starts that node's workers; srun's man page, "OUTPUT ENVIRONMENT VARIABLES",
says what it sets.
"""

from __future__ import annotations

from collections.abc import Mapping

from argosy.config.schema import RunConfig
from argosy.errors import UserError

TASKS, NODES, NODE = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURMD_NODENAME"
TASK = "SLURM_PROCID"


def is_step(environment: Mapping[str, str]) -> bool:
    """Return True in a process that srun has started; False in a batch script, or a shell of salloc."""
    return TASKS in environment


def is_first_task(environment: Mapping[str, str]) -> bool:
    """Return True in the first task of a job step, and outside of one: the tasks of a step print to one place."""
    return not is_step(environment) or environment.get(TASK, "0") == "0"


def with_slurm(run: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """Return `run` with the nodes of the job step that this process is a task of, if it is one.

    launch.nodes becomes the step's number of nodes (if it is given, the others are spares), and launch.node SLURM's
    name of this one. launch.lease, unless that or launch.coordinator is given, becomes the run's folder, which all
    nodes see: if the first node is lost, another one takes its place.

    Raises: UserError if the step has several tasks on a node, or fewer nodes than launch.nodes.
    """
    if not is_step(environment):
        return run
    tasks, nodes = int(environment[TASKS]), int(environment[NODES])
    if tasks > nodes:
        raise UserError(
            f"srun has started {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}, and one argosy train on a node "
            f"starts all of its processes. Give srun --ntasks-per-node=1, with the node's CPUs and GPUs for that task."
        )
    launch = run.launch
    if launch.nodes > nodes:
        raise UserError(
            f"launch.nodes = {launch.nodes}, and srun has started {nodes}. Give srun --nodes={launch.nodes}, or "
            "leave launch.nodes out: it is the number of srun's nodes then."
        )
    if nodes == 1:
        return run
    given: dict[str, object] = {"nodes": nodes if launch.nodes == 1 else launch.nodes, "node": environment[NODE]}
    if not (launch.coordinator or launch.lease):
        given["lease"] = "folder"
    return run.model_copy(update={"launch": launch.model_copy(update=given)})
