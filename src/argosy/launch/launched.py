"""Runs that were launched: their jobs, what has become of them, and what they print."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from argosy.config.load import RUN_FILE
from argosy.engines.engine import follow_files
from argosy.engines.record import JOB_RECORD, LAUNCH_FOLDER, LaunchedJob
from argosy.engines.table import engine_of, state_of
from argosy.errors import UserError
from argosy.files import RUN_LOCK, is_locked
from argosy.sync.layout import SITES, kept_in
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


def launched_in(root: Path) -> list[Launched]:
    """Return the runs in and under `root`, launched or not, in alphabetical order."""
    folders = [record.parent.parent for record in records_in(root)]
    jobs = {own_id(root) if folder == root else str(folder.relative_to(root)): folder for folder in folders}
    found = {**find_runs(root), **jobs}
    return [_launched(name, folder) for name, folder in sorted(found.items())]


def records_in(root: Path) -> list[Path]:
    """Return the records of jobs: those that have not begun have folders that are no runs yet."""
    levels = ("", "*/", f"{SITES}/*/", f"*/{SITES}/*/")
    return [path for level in levels for path in root.glob(f"{level}{LAUNCH_FOLDER}/{JOB_RECORD}")]


def record_of(folder: Path) -> tuple[LaunchedJob | None, str]:
    """Return the record of a run's job, and what is wrong with it: a list has other runs too."""
    try:
        return LaunchedJob.load(folder), ""
    except UserError as problem:
        return None, one_line(problem)


def _launched(name: str, folder: Path) -> Launched:
    (job, problem), state, why, step = record_of(folder), "", "", None
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
        elif engine_state == "ended" and state in ("", "training", "silent") and not holders(folder):
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


def holders(run_dir: Path) -> list[str]:
    """Return the processes that hold a run's folder, in words.

    After its job has ended these were started by hand, or they have outlived the process that held them.
    """
    found = []
    with suppress(OSError):
        for path in sorted(kept_in(run_dir).glob(f"{RUN_LOCK}*")):
            if is_locked(path):
                node = path.name.removeprefix(RUN_LOCK).removeprefix("-")
                pid = (path.read_text().split() or ["unknown"])[0]
                found.append(f"process {pid}" + (f" on {node}" if node else ""))
    return found


def _has_printed(job: LaunchedJob) -> bool:
    """Return True if `argosy logs` has something to show, as far as that is known here."""
    if not job.log:
        return True  # its engine has it
    paths = engine_of(job).files(job).values()
    return any(path.is_file() and path.stat().st_size for path in paths)


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def _are_there(run_dir: Path) -> bool:
    """Return True if the run or a part of it was launched."""
    return any((folder / LAUNCH_FOLDER / JOB_RECORD).exists() for folder in (run_dir, *(run_dir / SITES).glob("*")))


def jobs_of(run_dir: Path) -> dict[str, LaunchedJob]:
    """Return the jobs of a run: its own under "", or those of its sites by name, if these were launched.

    Raises: UserError if it has none.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such folder. `argosy runs` lists the runs here.")
    folders = {"": run_dir} | {path.name: path for path in sorted((run_dir / SITES).glob("*"))}
    jobs = {name: job for name, folder in folders.items() if (job := LaunchedJob.load(folder)) is not None}
    if not jobs and not (run_dir / RUN_FILE).exists():
        raise UserError(f"{run_dir}: not a run: it has no {RUN_FILE}. Name the folder of a run, such as runs/demo.")
    if not jobs:
        raise UserError(
            f"{run_dir}: the run was not launched by `argosy launch`, so no engine knows it. "
            "Press Ctrl-C where it was started: it saves, and ends."
        )
    return {"": jobs[""]} if "" in jobs else jobs


def _printed_by(jobs: Mapping[str, LaunchedJob], follow: bool) -> Iterator[bytes]:
    """Yield what several jobs print, each line with the job's name before it; follow: until all have ended."""
    lines: SimpleQueue[bytes | None] = SimpleQueue()

    def read(name: str, job: LaunchedJob) -> None:
        rest = b""
        try:
            for piece in engine_of(job).logs(job, follow):
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    lines.put(b"%s | %s\n" % (name.encode(), line))
            if rest:
                lines.put(b"%s | %s\n" % (name.encode(), rest))
        except UserError as problem:
            lines.put(f"{name} | {problem}\n".encode())
        finally:
            lines.put(None)

    for name, job in jobs.items():
        threading.Thread(target=read, args=(name, job), daemon=True).start()
    left = len(jobs)
    while left:
        line = lines.get()
        if line is None:
            left -= 1
        else:
            yield line


def printed(run_dir: Path, follow: bool) -> Iterator[bytes]:
    """Yield what a run prints, in pieces; follow: until it has ended.

    Of a run that was not launched, the first worker prints to its user's terminal, and its folder has only what the
    others and the coordinator print. Of one that another user has launched, its folder is read, and no engine asked.

    Raises: UserError if there is neither a job nor a run.
    """
    jobs = {} if run_dir.is_dir() and not _are_there(run_dir) else jobs_of(run_dir)
    if jobs and not any(job.foreign for job in jobs.values()):
        yield from engine_of(jobs[""]).logs(jobs[""], follow) if "" in jobs else _printed_by(jobs, follow)
        return
    reader = None if jobs and not is_run(run_dir) else RunReader(run_dir)

    def has_ended() -> bool:
        if not follow or reader is None:
            return True
        reader.refresh()
        return reader.state != "training"

    paths = [*run_dir.glob(f"{LAUNCH_FOLDER}/*.out"), *run_dir.glob("logs/*")]
    yield from follow_files({path.stem: path for path in sorted(paths)}, has_ended)
