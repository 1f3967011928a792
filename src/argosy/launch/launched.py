"""Launching a run on an engine, and what has become of runs that were launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from argosy.errors import UserError
from argosy.files import made_folder
from argosy.launch.engines.engine import FOLDER, RECORD, Job, Request
from argosy.launch.engines.followed import follow as followed
from argosy.launch.engines.table import ENGINES, engine_of
from argosy.launch.own_folder import check_is_own
from argosy.processes.secret import FILE, NAME, VALUE, fingerprint_in, fingerprint_of
from argosy.watch.reader import RunReader, is_run
from argosy.watch.runs import find_runs


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
    """waiting or running, as the engine says; else what the run's folder says: finished, stopped, failed, silent."""
    why: str
    step: int | None
    """The steps that it has made; None before the first."""


def launch(request: Request, engine: str) -> Job:
    """Launch a run. Raises: UserError if its job before still waits or runs, or the engine refuses."""
    on = ENGINES[engine]()
    on.check(request)
    check_is_own(request.run_dir)
    before = Job.load(request.run_dir)
    if before is not None and (state := engine_of(before).state(before)[0]) != "ended":
        raise UserError(
            f"{request.run_dir}: its job {before.id} on {before.engine} is {state}. `argosy stop {request.run_dir}` "
            "stops it; --run-dir gives this run another folder."
        )
    secret = _own_secret(request.run_dir)
    with made_folder(request.folder):
        job = on.submit(request)
        job = job.model_copy(update={"secret": secret})
        job.save(request.run_dir)
    return job


def _own_secret(run_dir: Path) -> str:
    """Return the fingerprint of the run's secret. Raises: UserError if a run beside it, under way, has the same."""
    mine = fingerprint_of(run_dir)
    for other in run_dir.parent.glob(f"*/{FOLDER}/job.json") if mine else ():
        folder = other.parent.parent
        job = Job.load(folder)
        if job is None or folder == run_dir or mine not in (job.secret, fingerprint_in(folder)):
            continue
        if engine_of(job).state(job)[0] != "ended":
            raise UserError(
                f"{run_dir} and {folder} have one secret, and who knows it may join both runs. Unset {VALUE} and "
                f"{FILE}: each run makes its own; if one folder is a copy of the other, delete {NAME} in it."
            )
    return mine


def launched_in(root: Path) -> list[Launched]:
    """Return the runs in and under `root`, launched or not, in alphabetical order."""
    found = {**find_runs(root), **{str(p.parent.parent.relative_to(root)): p.parent.parent for p in _records(root)}}
    return [_launched(name, folder) for name, folder in sorted(found.items())]


def _records(root: Path) -> list[Path]:
    """Return the records of jobs that have not begun: their folders are no runs yet."""
    return [*root.glob(f"{FOLDER}/job.json"), *root.glob(f"*/{FOLDER}/job.json")]


def _launched(name: str, folder: Path) -> Launched:
    job, state, why, step = Job.load(folder), "", "", None
    if is_run(folder):
        reader = RunReader(folder)
        reader.refresh()
        last = reader.last_line.get("step")
        state, why, step = reader.state, reader.why, None if last is None else int(last) + 1
    if job is not None:
        with suppress(UserError):  # it was launched from another machine: only the folder can tell
            engine_state, words = engine_of(job).state(job)
            if engine_state == "waiting" or (engine_state == "running" and state != "training"):
                state, why = engine_state, words
            elif engine_state == "ended" and state in ("", "training", "silent"):
                state, why = "ended", f"{words}; `argosy logs {folder}` says more".lstrip("; ")
            step = engine_of(job).step(job) if step is None else step
    return Launched(
        id=name,
        folder=folder,
        engine="" if job is None else job.engine,
        job="" if job is None else job.id,
        state=state,
        why=why,
        step=step,
    )


def job_in(run_dir: Path) -> Job:
    """Return the job of a run's folder. Raises: UserError if the run was not launched."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such folder. `argosy runs` lists the runs here.")
    job = Job.load(run_dir)
    if job is None:
        raise UserError(f"{run_dir}: the run was not launched by `argosy launch`, so no engine knows it.")
    return job


def printed(run_dir: Path, follow: bool) -> Iterator[bytes]:
    """Yield what a run prints, in pieces; follow: until it has ended.

    Of a run that was not launched, the first worker prints to its user's terminal, and its folder has only what the
    others and the coordinator print.

    Raises: UserError if there is neither a job nor a run.
    """
    if not is_run(run_dir) or (run_dir / FOLDER / RECORD).exists():
        job = job_in(run_dir)
        yield from engine_of(job).logs(job, follow)
        return
    reader = RunReader(run_dir)

    def has_ended() -> bool:
        reader.refresh()
        return not follow or reader.state != "training"

    yield from followed({path.stem: path for path in sorted((run_dir / "logs").glob("*"))}, has_ended)
