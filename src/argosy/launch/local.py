"""A run on this machine, or this machine's part of one: settle the run's configuration and hold its processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from argosy.checkpoint.store import committed
from argosy.config.schema import RunConfig
from argosy.data.manifest import TOKENIZER
from argosy.errors import RunFailed, UserError
from argosy.extend.trust import approve
from argosy.launch import run_folder
from argosy.launch.devices import ask, devices_of_run
from argosy.launch.profile import check_profile
from argosy.launch.resolve import resolve
from argosy.launch.shown import Following, OnStep, Shown, shown
from argosy.launch.sites import settle_site, train_sites
from argosy.observe.events import Events
from argosy.observe.report import Report
from argosy.observe.screen import Progress
from argosy.observe.terminal import lasting_output
from argosy.plan.check import check_size
from argosy.plan.plan import is_asynchronous
from argosy.plan.search.auto import processes_of
from argosy.processes.fork_server import ForkServer
from argosy.sinks.table import check_sinks
from argosy.supervise.agent import Agent, node_name, process_name
from argosy.supervise.node_workers import WORKER
from argosy.supervise.place import check_place
from argosy.sync.server.layout import is_server


def train(
    run: RunConfig,
    run_dir: str | Path | None = None,
    *,
    accept_changes: bool = False,
    quiet: bool = False,
    origin: Callable[[str], str] = lambda key: "",
    on_step: OnStep | None = None,
) -> Report:
    """Train `run` in `run_dir` (runs/NAME by default) with processes of this machine; return its report.

    If the folder holds a checkpoint of this run, it goes on from there. With launch.nodes, this is one of the machines,
    and returns when the run is done. quiet: what rank 0 prints goes to the folder's logs too. origin: returns where a
    key of the run has its value from, for messages. on_step: called in this process, in a thread of its own, with each
    new line of metrics.jsonl: a step has "loss", an evaluation "validation_loss", both have "step". A step that is run
    again after a failure is told again. If on_step raises, the run saves its state and ends, and that error is raised.

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
        return train_sites(run, run_dir, accept_changes=accept_changes, quiet=quiet)
    run, run_dir = settle_site(run, run_dir, Progress(enabled=not quiet).say)
    _check_processes(run, origin)
    check_place(run.launch)
    check_sinks(run.observe, run.extend)
    with (
        shown(quiet) as where,
        lasting_output(run_dir / "logs" / f"{process_name(run.launch)}.log"),
        fork_server(where) as forks,
        run_folder.locked(run_dir, _name_of_node(run), run.launch.nodes),
    ):
        progress = Progress(enabled=not quiet)
        began = time.monotonic()
        with run_folder.settling(run_dir):
            with progress.during("reading the data"):
                run, data = resolve(run, progress)
            run = run_folder.enter(run_dir, run, data.identity, accept_changes)
            with progress.during("finding devices"):
                devices = devices_of_run(run, partial(ask, forks, run.resilience))
            with progress.during("choosing a plan"):
                plan = run_folder.settle_plan(run_dir, run, devices, progress.say)
            check_profile(run, plan)
            run = run_folder.write(run_dir, run, plan, data.sources[0].folder / TOKENIZER)
        progress.close()
        if (report := _report_if_finished(run_dir, run)) is not None:
            progress.say(
                f"{run_dir} is finished. More --train.steps or --train.minutes make it longer; --name or --run-dir "
                "another run."
            )
            progress.say(report.in_words())
            return report
        (run_dir / "report.json").unlink(missing_ok=True)
        if where.screen is not None:
            where.screen.begin(run_dir)
        Events(run_dir, process_name(run.launch)).write("settled", seconds=round(time.monotonic() - began, 3))
        agent = Agent(run_dir, run, plan, forks, quiet)
        with Following(run_dir, on_step, agent.stop):
            agent.run()
        if is_asynchronous(run.plan) and not (run_dir / "report.json").exists():
            raise RunFailed(f"{run_dir}: the run was over before this worker had made an update.")
        return Report.load(run_dir)


@contextmanager
def fork_server(where: Shown) -> Iterator[ForkServer]:
    """Start the fork server of a run's processes; it imports torch while the run is being settled."""
    with closing(ForkServer(WORKER.module, where.stdout, where.stderr)) as forks:
        yield forks


def _report_if_finished(run_dir: Path, run: RunConfig) -> Report | None:
    """Return the report of a run that is finished; None if it is not."""
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
