"""The engines, by name."""

from __future__ import annotations

from argosy.errors import UserError
from argosy.launch.engines.engine import Engine, Job
from argosy.launch.engines.kubernetes import Kubernetes
from argosy.launch.engines.local import Local
from argosy.launch.engines.login import Login
from argosy.launch.engines.ray import Ray
from argosy.launch.engines.slurm import Slurm
from argosy.launch.engines.ssh import Ssh

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (Slurm, Kubernetes, Ray, Ssh, Local, Login)}


def engine_of(job: Job) -> Engine:
    """Return the engine that a job was launched on. Raises: UserError if this version does not know it."""
    if job.engine not in ENGINES:
        raise UserError(f"the run was launched on {job.engine!r}, which this version does not know.")
    return ENGINES[job.engine]()
