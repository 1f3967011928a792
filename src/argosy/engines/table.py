"""The engines, by name."""

from __future__ import annotations

from collections.abc import Mapping

from argosy.config.launch import LaunchOptions
from argosy.engines.engine import Engine
from argosy.engines.kubernetes import Kubernetes
from argosy.engines.local import Local
from argosy.engines.login import Login
from argosy.engines.ray import Ray
from argosy.engines.record import JOB_RECORD, LAUNCH_FOLDER, JobState, LaunchedJob
from argosy.engines.slurm import Slurm
from argosy.engines.ssh import Ssh
from argosy.errors import UserError

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (Slurm, Kubernetes, Ray, Ssh, Local, Login)}


def engine_for_programs(what: str, options: LaunchOptions, called: Mapping[str, str]) -> Engine:
    """Return the engine on which programs are to run. what: these, in the plural; called: as in `check_options`.

    Raises: UserError if it starts none, is not there, or an option has no meaning there.
    """
    engine = ENGINES[options.on]()
    if not engine.starts_programs:
        known = ", ".join(name for name, kind in sorted(ENGINES.items()) if kind.starts_programs)
        raise UserError(f"--on {engine.name}: {what} are not supported there. Choose one of: {known}.")
    engine.check_options(options, called)
    engine.check_is_there(options)
    return engine


def engine_of(job: LaunchedJob) -> Engine:
    """Return the engine that a job was launched on, if that may be asked about it.

    Raises: UserError if this version does not know it, or the record is not this user's, or was changed.
    """
    if job.engine not in ENGINES:
        raise UserError(f"the run was launched on {job.engine!r}, which this version does not know.")
    if job.foreign:
        raise UserError(
            f"its record ({LAUNCH_FOLDER}/{JOB_RECORD}) may be the work of {job.foreign}: it is shown, and nothing is "
            "done with it. Ask who launched the run."
        )
    engine = ENGINES[job.engine]()
    engine.check_job(job)
    if engine.needs_seal and not job.is_sealed:
        raise UserError(
            f"its record ({LAUNCH_FOLDER}/{JOB_RECORD}) has no seal of yours, so nobody knows who wrote what it tells "
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
