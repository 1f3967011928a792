"""Launching a run on an engine, and what has become of runs that were launched."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from argosy.engines.engine import Engine, RunJob, follow_files
from argosy.engines.record import JOB_RECORD, LAUNCH_FOLDER, LaunchedJob, user_key
from argosy.engines.table import ENGINES, engine_of, state_of
from argosy.errors import UserError
from argosy.files import RUN_LOCK, is_locked, made_folder
from argosy.launch.requeue import IDLE_JOBS_FILE
from argosy.launch.run_folder import check_is_run_folder
from argosy.launch.sites import are_there, jobs_of, printed_by
from argosy.processes.secret import (
    SECRET_FILE,
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    fingerprint_in,
    fingerprint_of,
    secret_of,
)
from argosy.sync.layout import SITES, home_of, kept_in
from argosy.watch.library import find_runs, own_id
from argosy.watch.reader import RunReader, is_run


@dataclass(frozen=True)
class Launched:
    """A run, and what its engine says of it."""

    id: str
    """The run's path in the folder that was searched."""
    folder: Path
    engine: str
    """Empty if the run was not launched."""
    job: str
    state: str
    """waiting or running, as the engine says; else what its folder says: finished, stopped, failed, silent, dead;
    unknown if the engine gives no answer and the folder does not say."""
    why: str
    step: int | None
    """The steps that it has made; None before the first."""


def launch(request: RunJob, engine: str) -> LaunchedJob:
    """Launch a run. Raises: UserError if its job before still waits or runs, or the engine refuses."""
    on = ENGINES[engine]()
    _check(request, on)
    secret = _own_secret(home_of(request.run_dir))
    with made_folder(request.folder):
        (request.folder / IDLE_JOBS_FILE).unlink(missing_ok=True)  # whoever launches it again has mended the cause
        job = on.start(request)
        job = job.model_copy(update={"secret": secret})
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
    for other in _records(run_dir.parent) if mine else ():
        folder = other.parent.parent
        if home_of(folder) == run_dir:
            continue
        job, _ = _record_in(folder)
        if job is None or mine not in (job.secret, fingerprint_in(home_of(folder))):
            continue
        if state_of(job)[0] != "ended":
            raise UserError(
                f"{run_dir} and {folder} have one secret, and who knows it may join both runs. Unset "
                f"{SECRET_VARIABLE} and {SECRET_FILE_VARIABLE}: each run makes its own; if one folder is a copy of the "
                f"other, delete {SECRET_FILE} in it."
            )
    return mine


def launched_in(root: Path) -> list[Launched]:
    """Return the runs in and under `root`, launched or not, in alphabetical order."""
    folders = [record.parent.parent for record in _records(root)]
    jobs = {own_id(root) if folder == root else str(folder.relative_to(root)): folder for folder in folders}
    found = {**find_runs(root), **jobs}
    return [_launched(name, folder) for name, folder in sorted(found.items())]


def _records(root: Path) -> list[Path]:
    """Return the records of jobs: those that have not begun have folders that are no runs yet."""
    levels = ("", "*/", f"{SITES}/*/", f"*/{SITES}/*/")
    return [path for level in levels for path in root.glob(f"{level}{LAUNCH_FOLDER}/{JOB_RECORD}")]


def _record_in(folder: Path) -> tuple[LaunchedJob | None, str]:
    """Return the record of a run's job, and what is wrong with it: a list has other runs too."""
    try:
        return LaunchedJob.load(folder), ""
    except UserError as problem:
        return None, one_line(problem)


def _launched(name: str, folder: Path) -> Launched:
    (job, problem), state, why, step = _record_in(folder), "", "", None
    if is_run(kept_in(folder)):
        reader = RunReader.read(kept_in(folder))
        last = reader.last_line.get("step")
        state, why, step = reader.state, reader.why, last + 1 if isinstance(last, int) else None
    if job is not None:
        engine_state, words = state_of(job)
        if engine_state == "waiting" or (engine_state == "running" and state != "training"):
            state, why = engine_state, words
        elif engine_state == "unknown" and state in ("", "training", "silent"):
            state, why = state if state == "training" else "unknown", one_line(words)
        elif engine_state == "ended" and state in ("", "training", "silent") and not _is_held(kept_in(folder)):
            more = f"`argosy logs {shlex.quote(str(folder))}` says more" if _has_printed(job) else ""
            state, why = "ended", "; ".join(filter(None, (words, more)))
        if step is None and engine_state != "unknown":
            with suppress(UserError):
                step = engine_of(job).step(job)
    elif problem:
        state, why = state or "unknown", why or problem
    return Launched(
        id=name,
        folder=folder,
        engine="" if job is None else job.engine,
        job="" if job is None else job.id,
        state=state,
        why=why,
        step=step,
    )


def _is_held(run_dir: Path) -> bool:
    """Return True if a process holds the run's folder: somebody trains it by hand, after its job has ended."""
    with suppress(OSError):
        return any(map(is_locked, run_dir.glob(f"{RUN_LOCK}*")))
    return False


def _has_printed(job: LaunchedJob) -> bool:
    """Return True if `argosy logs` has something to show, as far as that is known here."""
    if not job.log:
        return True  # its engine has it
    paths = engine_of(job).files(job).values()
    return any(path.is_file() and path.stat().st_size for path in paths)


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def printed(run_dir: Path, follow: bool) -> Iterator[bytes]:
    """Yield what a run prints, in pieces; follow: until it has ended.

    Of a run that was not launched, the first worker prints to its user's terminal, and its folder has only what the
    others and the coordinator print. Of one that another user has launched, its folder is read, and no engine asked.

    Raises: UserError if there is neither a job nor a run.
    """
    jobs = {} if run_dir.is_dir() and not are_there(run_dir) else jobs_of(run_dir)
    if jobs and not any(job.foreign for job in jobs.values()):
        yield from engine_of(jobs[""]).logs(jobs[""], follow) if "" in jobs else printed_by(jobs, follow)
        return
    reader = None if jobs and not is_run(run_dir) else RunReader(run_dir)

    def has_ended() -> bool:
        if not follow or reader is None:
            return True
        reader.refresh()
        return reader.state != "training"

    paths = [*run_dir.glob(f"{LAUNCH_FOLDER}/*.out"), *run_dir.glob("logs/*")]
    yield from follow_files({path.stem: path for path in sorted(paths)}, has_ended)
