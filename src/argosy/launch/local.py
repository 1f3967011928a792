"""A run on this machine: starts its processes, watches them, starts them again after a crash."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from argosy.checkpoint.store import committed
from argosy.config.schema import LaunchConfig, RunConfig
from argosy.data.manifest import TOKENIZER
from argosy.errors import FINAL, ArgosyError, Interrupted, RunFailed, UserError
from argosy.launch import run_folder
from argosy.launch.devices import find_devices
from argosy.launch.resolve import resolve
from argosy.observe.events import Events
from argosy.observe.progress import Progress
from argosy.observe.report import Report
from argosy.parallel.world import LAUNCHER, threads_per_process
from argosy.plan.auto import choose_plan, processes_of
from argosy.plan.plan import Plan

POLL_S = 0.05
"""How soon the death of a worker is seen."""
TORCHELASTIC_TAKES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals whose handlers its `start_processes` replaces."""
PEER_GONE = "Connection closed by peer"
"""What gloo says to the survivors of a dead process."""

logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the launcher says it in its own words


def train(run: RunConfig, run_dir: Path | None = None, *, accept_changes: bool = False, quiet: bool = False) -> Report:
    """Train `run` in `run_dir` (runs/NAME by default) with processes of this machine; returns its report.

    If the folder holds a checkpoint of this run, it goes on from there. quiet: what the first worker prints is kept
    in the folder's logs too.

    Raises: UserError if the run cannot be started as asked; RunFailed if it could not go on; Interrupted after
    SIGTERM or SIGINT, once its state is saved.
    """
    run_dir = (run_dir or Path("runs") / run.name).absolute()
    progress = Progress(enabled=not quiet)
    with run_folder.locked(run_dir):
        run, data = resolve(run, progress)
        run = run_folder.enter(run_dir, run, data.identity, accept_changes)
        plan = choose_plan(run, find_devices(run.launch, planned=processes_of(run.plan)))
        run_folder.write(run_dir, run, plan, data.sources[0].folder / TOKENIZER)
        progress.close()
        if (report := _report_if_finished(run_dir, run)) is not None:
            progress.say(
                f"{run_dir} is finished. More --train.steps or --train.minutes make it longer; --name or --run-dir "
                "another run."
            )
            progress.say(report.in_words())
            return report
        (run_dir / "report.json").unlink(missing_ok=True)
        Supervisor(run_dir, run.launch, plan, quiet).run()
        return Report.load(run_dir)


def _report_if_finished(run_dir: Path, run: RunConfig) -> Report | None:
    """The report of a run that has nothing left to do."""
    if not (run_dir / "report.json").exists() or not committed(run_dir):
        return None
    report = Report.load(run_dir)
    return report if report.status == "finished" and report.steps == run.train.steps else None


class Supervisor:
    """Holds the processes of a run on this machine, and the store where they meet."""

    def __init__(self, run_dir: Path, launch: LaunchConfig, plan: Plan, quiet: bool = False):
        self._run_dir, self._launch, self._size, self._quiet = run_dir, launch, plan.world_size, quiet
        self._events = Events(run_dir, "launcher")
        self._workers: PContext | None = None
        self._signal: int | None = None

    def run(self) -> None:
        """Start the workers, and again after each crash, until they are done.

        Raises: RunFailed, Interrupted, or the error that the workers themselves ended with.
        """
        for attempt in range(self._launch.max_restarts + 1):
            failure = self._attempt(attempt)
            if failure is not None and failure.exitcode >= FINAL:
                raise _as_error(failure)
            if self._signal is not None:
                name = signal.Signals(self._signal).name
                raise Interrupted(f"stopped by {name}. {self._how_to_go_on()}", self._signal)
            if failure is None:
                return
            self._tell(failure, attempt)
        raise RunFailed(
            f"the workers died {self._launch.max_restarts + 1} times (launch.max_restarts = "
            f"{self._launch.max_restarts}). {self._how_to_go_on()}"
        )

    def _attempt(self, attempt: int) -> ProcessFailure | None:
        """Run the workers to their end; the failure that came first, if any."""
        # A store of its own for each attempt: no process meets the addresses of a dead one. It lives here,
        # since one inside rank 0 would die with rank 0.
        store = _open_store(self._launch)
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_RUN_ID": "workers",  # names the folder of their logs
            "OMP_NUM_THREADS": str(threads_per_process(self._launch, self._size)),
            LAUNCHER: str(os.getpid()),
        }
        ranks = range(self._size)
        # The first rank speaks to the terminal; what the others print is kept in files.
        redirects = {rank: Std.NONE if rank == 0 and not self._quiet else Std.ALL for rank in ranks}
        with _handlers_kept():
            self._workers = start_processes(
                "worker",
                sys.executable,
                {rank: ("-m", "argosy.launch.worker", str(self._run_dir)) for rank in ranks},
                {rank: {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks},
                DefaultLogsSpecs(str(self._run_dir / "logs"), redirects=redirects),
            )
        self._events.write("workers_started", attempt=attempt, pids=list(self._workers.pids().values()))
        with self._signals_forwarded():
            result = self._workers.wait(period=POLL_S)
        assert result is not None
        return _first_cause(list(result.failures.values())) if result.is_failed() else None

    @contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        """Hand SIGTERM and SIGINT on to the workers, which save and end; a second one kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        before = {number: signal.signal(number, self._forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        assert self._workers is not None
        if self._signal is not None:
            self._workers.close(signal.SIGKILL)
            return
        self._signal = number
        self._events.write("signal", number=number)
        for pid in self._workers.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _tell(self, failure: ProcessFailure, attempt: int) -> None:
        cause = _cause(failure)
        self._events.write(
            "worker_died", rank=failure.local_rank, pid=failure.pid, exit_code=failure.exitcode, why=cause
        )
        print(f"argosy: worker {failure.local_rank} (process {failure.pid}) died: {cause}", file=sys.stderr)
        print(_traceback(failure), end="", file=sys.stderr)
        if attempt < self._launch.max_restarts:
            print(
                f"  Starting again from the newest checkpoint ({attempt + 1} of {self._launch.max_restarts}).",
                file=sys.stderr,
            )

    def _how_to_go_on(self) -> str:
        checkpoints = committed(self._run_dir)
        where = f"from step {checkpoints[-1].step}" if checkpoints else "from the start: nothing was saved yet"
        return f"The same command goes on {where} ({self._run_dir})."


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Keep this process's signal handlers: torchelastic puts its own in their place, which would undo nohup."""
    before = {number: signal.getsignal(number) for number in TORCHELASTIC_TAKES}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_store(launch: LaunchConfig) -> TCPStore:
    try:
        return TCPStore("127.0.0.1", launch.port, is_master=True, wait_for_workers=False)
    except DistNetworkError:
        raise UserError(
            f"launch.port = {launch.port} is in use on this machine. Try launch.port = 0, which takes a free one."
        ) from None


def _first_cause(failures: list[ProcessFailure]) -> ProcessFailure:
    """The failure that brought the others about.

    A death by a signal that was not ours comes first, an error of a connection to one that was gone last.
    """

    def order(failure: ProcessFailure) -> tuple[bool, bool, int]:
        ours = failure.exitcode >= 0 or failure.exitcode == -signal.SIGTERM
        return ours, PEER_GONE in _message(failure), failure.timestamp

    return min(failures, key=order)


def _cause(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"signal {signal.Signals(-failure.exitcode).name}"
    return f"exit code {failure.exitcode}, {_message(failure).splitlines()[0]}"


def _traceback(failure: ProcessFailure) -> str:
    """Where the worker failed, if it could say so."""
    recorded: Any = failure.message
    return str(recorded["extraInfo"]["py_callstack"]) if isinstance(recorded, dict) else ""


def _as_error(failure: ProcessFailure) -> ArgosyError:
    """The error that a worker recorded before it ended with FINAL + the error's exit code."""
    kind, _, text = _message(failure).partition(": ")
    return UserError(text) if kind == UserError.__name__ else RunFailed(text)


def _message(failure: ProcessFailure) -> str:
    """What the worker recorded, "KIND: text", or torchelastic's own words if it died without a record."""
    recorded: Any = failure.message  # declared a str; a dict once it is read from the worker's error file
    return str(recorded["message"] if isinstance(recorded, dict) else recorded)
