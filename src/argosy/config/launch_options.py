"""The options of `argosy launch`, said once: the command line, a site's table `launch` and an engine's request have
these fields, and what each means is under it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import tyro
from pydantic import NonNegativeInt, PositiveInt

EngineName = Literal["slurm", "kubernetes", "ray", "ssh", "local"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a run asks of the engine that starts it. Each engine takes some, and refuses the others."""

    nodes: PositiveInt = 1
    """Machines."""
    cpus_per_node: NonNegativeInt = 0
    """CPUs of each; slurm, ray: 0 asks for whole nodes, for this job alone."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each; 0 asks for none. ssh: so many are used, 0: all."""
    time: str = ""
    """slurm: the job's time limit, e.g. 24:00:00; it is requeued when that is over. Empty: the partition's."""
    memory_per_node: str = ""
    """Memory of each, in the cluster's words: slurm 64G, kubernetes 64Gi. Empty: what the cluster gives."""
    account: str = ""
    """slurm: the account that is charged."""
    partition: str = ""
    """slurm: the partition."""
    hosts: str = ""
    """ssh: the machines, e.g. node1,node2, each by a name that ssh takes."""
    namespace: str = ""
    """kubernetes: the namespace; empty: kubectl's own."""
    volume: str = ""
    """kubernetes: the PersistentVolumeClaim for data and runs, and its path in the pods if not /data: CLAIM[:PATH]."""
    address: str = ""
    """ray: of the cluster's dashboard, e.g. http://head:8265; empty: that of the cluster that this machine is in."""
    image: str = ""
    """kubernetes: the container image. slurm: that of each task (srun --container-image, of the pyxis plugin)."""
    extra: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Lines that are passed through. slurm: options of sbatch. ssh: of ssh. ray: of `ray job submit`. kubernetes: JSON,
    merged into the pod's spec. On the command line --extra=--constraint=h100, again for another line; in a site's table
    extra = ["--constraint=h100"]."""

    def for_engine(self) -> dict[str, Any]:
        """Return the values of these options by name."""
        return {field.name: getattr(self, field.name) for field in fields(EngineOptions)}


@dataclass(frozen=True, kw_only=True)
class _Place:
    on: EngineName = "local"
    """Where it is to run."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(EngineOptions, _Place):
    """Where a run is started, and what it asks for there."""
