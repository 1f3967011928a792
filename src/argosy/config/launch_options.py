"""Where jobs are started, and what they ask for: said once, with its meaning, for all that starts some.

`argosy launch`, a site's table `launch` and a parameter server's have all of these options; `argosy prepare` and
`argosy sweep`, whose jobs are programs on one machine each, have those of `ClusterOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import tyro
from pydantic import NonNegativeInt, PositiveInt

EngineName = Literal["slurm", "kubernetes", "ray", "ssh", "local"]


@dataclass(frozen=True, kw_only=True)
class _Machines:
    """The machines of a job."""

    nodes: PositiveInt = 1
    """Machines."""
    cpus_per_node: NonNegativeInt = 0
    """CPUs of each; slurm, ray: 0 asks for whole nodes, for this job alone."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each; 0 asks for none. ssh: so many are used, 0: all."""
    memory_per_node: str = ""
    """Memory of each, in the cluster's words: slurm 64G, kubernetes 64Gi. Empty: what the cluster gives."""
    hosts: str = ""
    """ssh: the machines, e.g. node1,node2, each by a name that ssh takes."""
    namespace: str = ""
    """kubernetes: the namespace; empty: kubectl's own."""
    volume: str = ""
    """kubernetes: the PersistentVolumeClaim for data and runs, and its path in the pods if not /data: CLAIM[:PATH]."""
    image: str = ""
    """kubernetes: the container image. slurm: that of each task (srun --container-image, of the pyxis plugin)."""


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What every command that starts jobs may say to their engine. Each engine takes some, and refuses the others."""

    time: str = ""
    """slurm: a job's time limit, e.g. 24:00:00; a run is requeued when that is over. Empty: the partition's."""
    account: str = ""
    """slurm: the account that is charged."""
    partition: str = ""
    """slurm: the partition."""
    address: str = ""
    """ray: of the cluster's dashboard, e.g. http://head:8265, or its head; empty: RAY_ADDRESS, else the cluster that
    this machine is in."""
    extra: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Lines that are passed through. slurm: options of sbatch. ssh: of ssh. ray: of `ray job submit`. kubernetes: JSON,
    merged into the pod's spec. On the command line --extra=--constraint=h100, again for another line; in a site's table
    extra = ["--constraint=h100"]."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ClusterOptions, _Machines):
    """What a job asks of the engine that starts it."""

    def for_engine(self) -> dict[str, Any]:
        """Return the values of these options by name."""
        return {field.name: getattr(self, field.name) for field in fields(EngineOptions)}

    @property
    def given(self) -> list[str]:
        """The names of these options that are not as they are if nobody says them."""
        return [field.name for field in fields(EngineOptions) if getattr(self, field.name) != field.default]


@dataclass(frozen=True, kw_only=True)
class _Place:
    on: EngineName = "local"
    """Where it is to run."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(EngineOptions, _Place):
    """Where a job is started, and what it asks for there."""
