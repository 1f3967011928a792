"""A run on this machine, or this machine's part of one: settle its configuration, hold its processes, show output:
in a live terminal, in a notebook, or as it is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, TextIO

from argosy.checkpoint.store import committed
from argosy.config.load import model_name
from argosy.config.schema import RunConfig
from argosy.data.manifest import DATA_MANIFEST as MANIFEST
from argosy.data.manifest import TOKENIZER
from argosy.errors import RunFailed, UserError, counted
from argosy.extend.loading import approve
from argosy.launch import run_folder
from argosy.launch.devices import ask, devices_of_run
from argosy.launch.resolve import check_data, check_profile, resolve, with_known_sizes
from argosy.launch.sites import settle_site, train_sites
from argosy.observe.events import Events
from argosy.observe.line_follower import LineFollower
from argosy.observe.report import Report
from argosy.observe.screen import Progress, Screen, read_lines_of
from argosy.observe.surfaces import NotebookSurface, TerminalSurface, is_in_notebook
from argosy.observe.terminal import has_live_line, lasting_output
from argosy.plan.plan import PLAN_VARIABLE, is_asynchronous
from argosy.plan.search.auto import may_compile, processes_of
from argosy.plan.search.space import check_size
from argosy.processes.fork_server import WORKER_MODULE, ForkServer
from argosy.sinks.table import check_sinks
from argosy.supervise.agent import Agent, node_name, process_name
from argosy.supervise.node_workers import COMPILER, WORKERS_IMPORTS
from argosy.supervise.place import check_place
from argosy.sync.layout import is_server
from argosy.watch.status import ending_in_words
from argosy.watch.terminal import FolderView


def train(
    run: RunConfig,
    run_dir: str | Path | None = None,
    *,
    accept_changes: bool = False,
    quiet: bool = False,
    origin: Callable[[str], str] = lambda key: "",
    on_step: OnStep | None = None,
    started: ForkServer | None = None,
) -> Report:
    """Train `run` in `run_dir` (runs/NAME by default) with processes of this machine; return its report.

    If the folder holds a checkpoint of this run, it goes on from there. With launch.nodes, this is one of the machines,
    and returns when the run is done. quiet: what rank 0 prints goes to the folder's logs too. origin: returns where a
    key of the run has its value from, for messages. on_step: called in this process, in a thread of its own, with each
    new line of metrics.jsonl: a step has "loss", an evaluation "validation_loss", both have "step". A step that is run
    again after a failure is told again. If on_step raises, the run saves its state and ends, and that error is raised.
    started: a fork server of `WORKER_MODULE` to take, and to close, in place of another.

    Raises: UserError if the run cannot be started as asked; RunFailed if it could not go on; Interrupted after
    SIGTERM or SIGINT, once its state is saved.
    """
    if not isinstance(run, RunConfig):
        raise UserError(f"train takes a RunConfig, not {run!r}. Try train(argosy.load({run!r})).")
    run_dir = (Path(run_dir) if run_dir else Path("runs") / run.name).absolute()
    if is_server(run):
        raise UserError(f'site = "{run.site}" is a parameter server: hold it with the command argosy train --site')
    run_folder.check_parts(run_dir, run)
    approve(run.extend.code)  # before any process of the run starts, which inherits that
    if run.sites and not run.site:
        if started is not None:
            started.close()
        return train_sites(run, run_dir, accept_changes=accept_changes, quiet=quiet)
    if run.sites:
        run, run_dir = settle_site(run, run_dir, Progress(enabled=not quiet).say)
    _check_processes(run, origin)
    check_place(run.launch)
    check_sinks(run.observe, run.extend)
    with (
        shown(quiet) as where,
        lasting_output(run_dir / "logs" / f"{process_name(run.launch)}.log"),
        fork_server(where, started) as forks,
        run_folder.locked(run_dir, _name_of_node(run), run.launch.nodes),
    ):
        progress = Progress(enabled=not quiet)
        began = time.monotonic()
        find = cache(partial(ask, forks, run.resilience, meanwhile=COMPILER if may_compile(run.plan) else None))
        with run_folder.settling(run_dir):
            run_folder.check_before_preparing(run_dir, run, partial(devices_of_run, run, find))
            with progress.during("reading the data"):
                run, data = resolve(run, progress)
            run = run_folder.enter(run_dir, run, data.identity, accept_changes)
            with progress.during("finding devices"):
                devices = devices_of_run(run, find)
            with progress.during("choosing a plan"):
                plan = run_folder.settle_plan(run_dir, run, devices, progress.say)
            check_profile(run, plan)
            run = run_folder.write(run_dir, run, plan, data.sources[0].folder / TOKENIZER)
        progress.close()
        if (report := _report_if_finished(run_dir, run)) is not None:
            progress.say(run_folder.finished_in_words(run_dir, run))
            progress.say(ending_in_words(run_dir, report))
            return report
        (run_dir / "report.json").unlink(missing_ok=True)
        if where.screen is not None:
            where.screen.begin(run_dir)
        Events(run_dir, process_name(run.launch)).write("settled", seconds=round(time.monotonic() - began, 3))
        forks.prepare(WORKERS_IMPORTS, {PLAN_VARIABLE: str(plan)})
        agent = Agent(run_dir, run, plan, forks, quiet)
        with Following(run_dir, on_step, agent.stop):
            agent.run()
        if is_asynchronous(run.plan) and not (run_dir / "report.json").exists():
            raise RunFailed(f"{run_dir}: the run was over before this worker had made an update.")
        report = Report.load(run_dir)
        if run.launch.nodes == 1:
            progress.say(ending_in_words(run_dir, report))
        return report


def would_train(run: RunConfig, run_dir: Path, origin: Callable[[str], str]) -> list[str]:
    """Return what `train` would do, in words that go on from "would"; nothing is written, no code of the user's runs.

    Raises: UserError, as `train`, for what is known before data are prepared.
    """
    run_folder.check_parts(run_dir, run)
    if run.sites:
        part = run.site or f"all {len(run.sites)} sites"
        return [f"train {part} of {run.name} on this machine, in {run_dir}"]
    _check_processes(run, origin)
    check_place(run.launch)
    check_sinks(run.observe, run.extend)
    run_folder.check_is_run_folder(run_dir)
    check_data(run)
    run = with_known_sizes(run)
    if _report_if_finished(run_dir, run) is not None:
        return []
    prepare, would = run.data.prepare, []
    if prepare.input and not (prepare.out / MANIFEST).exists():
        would.append(f"prepare {', '.join(prepare.input)} in {prepare.out}")
    plan = run_folder.settle_plan(run_dir, run, devices_of_run(run), lambda words: None)
    saved = committed(run_dir)
    length = f"{run.train.minutes:g} minutes" if run.train.minutes else f"{run.train.epochs:g} epochs"
    length = f"{run.train.steps} steps" if run.train.steps else length
    begun = f"from step {saved[-1].step}" if saved else "from the start"
    return [
        *would,
        f"start {counted(plan.world_size, 'process', 'es')} on {counted(run.launch.nodes, 'machine')}: {plan}",
        f"train {model_name(run.model, run.name)} for {length} of {run.train.global_batch} sequences of "
        f"{run.data.seq_len} tokens, {begun}, in {run_dir}",
    ]


@contextmanager
def fork_server(where: RunDisplay, started: ForkServer | None = None) -> Iterator[ForkServer]:
    """Start the fork server of a run's processes, if none was `started`; it imports torch while the run is settled."""
    with closing(started or ForkServer(WORKER_MODULE, where.stdout, where.stderr)) as forks:
        if started is not None:
            started.take_on(where.stdout, where.stderr)
        yield forks


def _report_if_finished(run_dir: Path, run: RunConfig) -> Report | None:
    if not (run_dir / "report.json").exists() or not committed(run_dir):
        return None
    report = Report.load(run_dir)
    return report if report.status == "finished" and report.steps == run.train.steps else None


def _name_of_node(run: RunConfig) -> str:
    """Return the node's name for the lock: each of several nodes has its own; a single one locks the whole folder."""
    return "" if run.launch.nodes == 1 else node_name(run.launch)


def _check_processes(run: RunConfig, origin: Callable[[str], str]) -> None:
    """Refuse a written plan that does not fit the nodes and processes that are said, before anything takes time.

    Raises: UserError.
    """
    if size := processes_of(run.plan):
        nodes = run.launch.nodes
        check_size(run.plan, size, run.launch, nodes * (run.launch.processes or -(-size // nodes)), origin)


RUN_FILE_LOOK_S = 0.1
"""Seconds between two looks at the file."""
OnStep = Callable[[dict[str, Any]], object]


class Following:
    """A block in which a function is called with each new record of a run's metrics.jsonl, in a thread.

    Training does not wait for it. If it raises, `stop` is called once, and the block ends with what it raised. (No
    generator: what it raises may be StopIteration.)
    """

    def __init__(self, run_dir: Path, on_step: OnStep | None, stop: Callable[[], None]):
        """`on_step`: the function; None: nothing is followed."""
        self._stop = stop
        self._is_over = Event()
        self._raised: BaseException | None = None
        self._thread: Thread | None = None
        if on_step is not None:
            self._lines = LineFollower(run_dir / "metrics.jsonl", by_line=True)
            self._lines.take()  # what is there now is not new
            self._thread = Thread(target=self._follow, args=(on_step,), name="argosy-on-step", daemon=True)

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *ended: object) -> None:
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join()
        if self._raised is not None:
            raise self._raised

    def _follow(self, on_step: OnStep) -> None:
        is_last = False
        try:
            while not is_last:
                is_last = self._is_over.wait(RUN_FILE_LOOK_S)
                for record in self._lines.take():
                    on_step(record)
        except BaseException as error:
            self._raised = error
            self._stop()


STANDARD = 1
END_S = 5.0
"""Time for which the last words are waited for: a process that outlives the run may still hold the pipe."""


@dataclass(frozen=True)
class RunDisplay:
    """The places where a run's processes print, and the screen that shows it."""

    stdout: int | None = None
    """A descriptor; None: this process's standard output."""
    stderr: int | None = None
    screen: Screen | None = None
    """Shows the run, if somebody looks."""


@contextmanager
def shown(quiet: bool = False) -> Iterator[RunDisplay]:
    """Show in this block what processes print to the descriptors that it yields.

    In a terminal and in a notebook a screen shows the run, unless it is to be `quiet`. In any other output without a
    descriptor (a StringIO) lines are passed on as they are; to any other, processes print themselves.
    """
    out = sys.stdout
    if out is None:
        yield RunDisplay()
    elif not quiet and is_in_notebook():
        with _screen(Screen(NotebookSurface(), FolderView), has_stderr=False) as found:
            yield found
    elif not _is_standard(out):
        with _pipe(lambda reader: _pass_on(reader, out)) as writer:
            yield RunDisplay(stdout=writer)
    elif not quiet and has_live_line(out):
        with _screen(Screen(TerminalSurface(out), FolderView), has_stderr=sys.stderr.isatty()) as found:
            yield found
    else:
        yield RunDisplay()


@contextmanager
def _screen(screen: Screen, has_stderr: bool) -> Iterator[RunDisplay]:
    with ExitStack() as held:
        held.enter_context(screen)
        writer = held.enter_context(_pipe(lambda reader: read_lines_of(reader, screen)))
        yield RunDisplay(stdout=writer, stderr=writer if has_stderr else None, screen=screen)


@contextmanager
def _pipe(read: Callable[[int], None]) -> Iterator[int]:
    """Yield the end of a pipe to write to; `read` is called in a thread with the other one, which it closes."""
    reader, writer = os.pipe()
    passing = Thread(target=read, args=(reader,), name="argosy-output", daemon=True)
    passing.start()
    try:
        yield writer
    finally:
        os.close(writer)
        passing.join(END_S)


def _is_standard(out: TextIO) -> bool:
    try:
        return out.fileno() == STANDARD
    except (AttributeError, OSError, ValueError):  # it has no descriptor, as a StringIO or a notebook's
        return False


def _pass_on(reader: int, out: TextIO) -> None:
    with open(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(OSError, ValueError):  # it was closed; the workers must not wait for it
                out.write(line)
                out.flush()
