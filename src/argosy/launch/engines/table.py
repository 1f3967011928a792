"""The engines, by name."""

from __future__ import annotations

from argosy.errors import UserError
from argosy.launch.engines.engine import Engine
from argosy.launch.engines.job import FOLDER, RECORD, JobState, LaunchedJob
from argosy.launch.engines.kubernetes import Kubernetes
from argosy.launch.engines.local import Local
from argosy.launch.engines.login import Login
from argosy.launch.engines.ray import Ray
from argosy.launch.engines.slurm import Slurm
from argosy.launch.engines.ssh import Ssh

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (Slurm, Kubernetes, Ray, Ssh, Local, Login)}


def engine_of(job: LaunchedJob) -> Engine:
    """Return the engine that a job was launched on, if that may be asked about it.

    Raises: UserError if this version does not know it, or the record is not this user's, or was changed.
    """
    if job.engine not in ENGINES:
        raise UserError(f"the run was launched on {job.engine!r}, which this version does not know.")
    if job.foreign:
        raise UserError(
            f"its record ({FOLDER}/{RECORD}) may be the work of {job.foreign}: it is shown, and nothing is done with "
            "it. Ask who launched the run."
        )
    engine = ENGINES[job.engine]()
    engine.check_job(job)
    if engine.needs_seal and not job.is_sealed:
        raise UserError(
            f"its record ({FOLDER}/{RECORD}) has no seal of yours, so nobody knows who wrote what it tells "
            f"{job.engine} to do: it is shown, and nothing is done with it. Give the command as the user, and with the "
            "home, that launched it."
        )
    return engine


def state_of(job: LaunchedJob) -> tuple[JobState, str]:
    """Return what a job's engine knows of it, and a few words; unknown, and why, if it cannot or must not be asked."""
    try:
        return engine_of(job).known(job)
    except UserError as problem:
        return "unknown", str(problem)
