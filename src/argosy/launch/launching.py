"""Launching a run on an engine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from argosy.engines.engine import Engine, RunJob
from argosy.engines.record import JOB_RECORD, LAUNCH_FOLDER, LaunchedJob, user_key
from argosy.engines.table import ENGINES, state_of
from argosy.errors import UserError
from argosy.files import made_folder
from argosy.launch.launched import holders, one_line, record_of, records_in
from argosy.launch.requeue import IDLE_JOBS_FILE
from argosy.launch.run_folder import IN_USE, check_is_run_folder
from argosy.processes.secret import (
    SECRET_FILE,
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    fingerprint_in,
    fingerprint_of,
    secret_of,
)
from argosy.sync.layout import home_of, kept_in


def launch(request: RunJob, engine: str) -> LaunchedJob:
    """Launch a run. Raises: UserError if its job before still waits or runs, or the engine refuses."""
    on = ENGINES[engine]()
    _check(request, on)
    secret = _own_secret(home_of(request.run_dir))
    with made_folder(request.folder):
        (request.folder / IDLE_JOBS_FILE).unlink(missing_ok=True)  # whoever launches it again has mended the cause
        job = on.start(request)
        job = job.model_copy(update={"secret": secret, "options": request.in_words()})
        job.save(request.run_dir)
    return job


def launch_sites(requests: Sequence[tuple[str, str, RunJob]]) -> Iterator[tuple[RunJob, LaunchedJob]]:
    """Launch sites, given site, engine and request of each; yield each once it is launched.

    Raises: UserError, before any is launched if that can be told; else it names those that were.
    """
    for _, engine, request in requests:
        _check(request, ENGINES[engine]())
    names: list[str] = []
    for name, engine, request in requests:
        whole = home_of(request.run_dir)
        try:
            with made_folder(whole):
                secret_of(whole)  # which all sites have
                job = launch(request, engine)
            yield request, job
        except UserError as problem:
            before = f" Launched before that: {', '.join(names)}." if names else ""
            raise UserError(f"site {name}: {problem}{before}") from None
        names.append(name)


def _check(request: RunJob, on: Engine) -> None:
    """Raises: UserError if the engine cannot take it, or its job before still waits or runs."""
    on.check(request)
    check_is_run_folder(request.run_dir)
    check_is_run_folder(kept_in(request.run_dir))
    if on.needs_seal:
        user_key()  # else the job could not be asked about
    before = LaunchedJob.load(request.run_dir)
    state, words = ("ended", "") if before is None else state_of(before)
    if before is None or state == "ended":
        if held_by := holders(request.run_dir):
            raise UserError(IN_USE.format(request.run_dir, ", ".join(held_by)))
        return
    if state == "unknown":
        its_job = f"{request.run_dir}: its job {before.id} on {before.engine}"
        record = shlex.quote(str(request.run_dir / LAUNCH_FOLDER / JOB_RECORD))
        raise UserError(
            f"{its_job} may still be there, and nothing says that it has ended: {one_line(words).rstrip('.')}. Try "
            f"again when its engine answers. If you know that it has ended, remove {record}; --run-dir gives this run "
            "another folder."
        )
    raise _still_there(request.run_dir, before, state)


def check_other_job(run_dir: Path, mine: LaunchedJob) -> None:
    """Check, inside the job `mine` that another program has submitted, that no other job has the run.

    Raises: UserError if the last one that is known waits or runs; if nobody knows, it has ended.
    """
    before = LaunchedJob.load(run_dir)
    if before is None or before.id == mine.id:
        return
    records = [before]
    if before.engine == mine.engine:  # from here its place may have another name, and its user another home
        records.append(before.model_copy(update={"place": mine.place, "is_sealed": True}))
    for record in records:
        if (state := state_of(record)[0]) in ("waiting", "running"):
            raise _still_there(run_dir, before, state)


def _still_there(run_dir: Path, job: LaunchedJob, state: str) -> UserError:
    return UserError(
        f"{run_dir}: its job {job.id} on {job.engine} is {state}. `argosy stop {shlex.quote(str(run_dir))}` stops it; "
        "--run-dir gives this run another folder."
    )


def _own_secret(run_dir: Path) -> str:
    """Return the fingerprint of the run's secret. Raises: UserError if a run beside it, under way, has the same."""
    mine = fingerprint_of(run_dir)
    for other in records_in(run_dir.parent) if mine else ():
        folder = other.parent.parent
        if home_of(folder) == run_dir:
            continue
        job, _ = record_of(folder)
        if job is None or mine not in (job.secret, fingerprint_in(home_of(folder))):
            continue
        if state_of(job)[0] != "ended":
            raise UserError(
                f"{run_dir} and {folder} have one secret, and who knows it may join both runs. Unset "
                f"{SECRET_VARIABLE} and {SECRET_FILE_VARIABLE}: each run makes its own; if one folder is a copy of the "
                f"other, delete {SECRET_FILE} in it."
            )
    return mine
