"""A run on this machine, or this machine's part of one: settle its configuration, hold its processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path

from argosy.checkpoint.store import committed
from argosy.config.load import model_name
from argosy.config.schema import RunConfig
from argosy.data.manifest import DATA_MANIFEST as MANIFEST
from argosy.errors import UserError, counted
from argosy.extend.loading import approve
from argosy.launch import run_folder
from argosy.launch.devices import ask, devices_of_run
from argosy.launch.resolve import check_data, check_profile, check_profiled_steps, resolve, with_known_sizes
from argosy.launch.sites import settle_site, train_sites
from argosy.observe.events import Events
from argosy.observe.line_follower import Following, OnStep
from argosy.observe.report import Report
from argosy.observe.screen import Progress
from argosy.observe.surfaces import RunDisplay, shown
from argosy.observe.terminal import lasting_output
from argosy.plan.plan import PLAN_VARIABLE, Plan
from argosy.plan.search.auto import Devices, may_compile, processes_of
from argosy.plan.search.space import check_size
from argosy.processes.fork_server import WORKER_MODULE, ForkServer
from argosy.processes.secret import check_tls
from argosy.sinks.follower import tell_the_rest
from argosy.sinks.table import check_sinks
from argosy.supervise.agent import Agent, node_name, process_name
from argosy.supervise.node_workers import COMPILER, WORKERS_IMPORTS
from argosy.supervise.place import check_place
from argosy.sync.layout import home_of, is_server, site_folder
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
    if on_step is not None and run.sites and not run.site:
        raise UserError("on_step with [[sites]]: each site has metrics of its own. Set site, or follow their files.")
    run_folder.check_parts(run_dir, run)
    approve(run.extend.code)  # before any process of the run starts, which inherits that
    if run.sites and not run.site:
        if started is not None:
            started.close()
        return train_sites(run, run_dir, accept_changes=accept_changes, quiet=quiet)
    with run_folder.making_home(home_of(site_folder(run_dir, run.site))) if run.sites else nullcontext():
        return _train(run, run_dir, accept_changes, quiet, origin, on_step, started)


def _train(
    run: RunConfig,
    run_dir: Path,
    accept_changes: bool,
    quiet: bool,
    origin: Callable[[str], str],
    on_step: OnStep | None,
    started: ForkServer | None,
) -> Report:
    """Train a run, or the part of one that `run.site` names; the arguments are those of `train`."""
    if run.sites:
        run, run_dir = settle_site(run, run_dir, Progress(enabled=not quiet).say)
    _check_here(run, run_dir, origin)
    with (
        shown(FolderView, quiet) as where,
        lasting_output(run_dir / "logs" / f"{process_name(run.launch)}.log"),
        fork_server(where, started) as forks,
        run_folder.locked(run_dir, node_name(run.launch) if run.launch.nodes > 1 else "", run.launch.nodes),
    ):
        progress = Progress(enabled=not quiet)
        began = time.monotonic()
        find = cache(partial(ask, forks, run.resilience, meanwhile=COMPILER if may_compile(run.plan) else ()))
        with run_folder.settling(run_dir):
            run, plan = settle(run, run_dir, accept_changes, partial(devices_of_run, find=find), progress)
        progress.close()
        events, is_alone = Events(run_dir, process_name(run.launch)), run.launch.nodes == 1
        if (report := told_if_finished(run_dir, run, progress, events if is_alone else None)) is not None:
            return report
        (run_dir / "report.json").unlink(missing_ok=True)
        if where.screen is not None:
            where.screen.begin(run_dir)
        events.write("settled", seconds=round(time.monotonic() - began, 3))
        forks.prepare(WORKERS_IMPORTS, {PLAN_VARIABLE: str(plan)})
        agent = Agent(run_dir, run, plan, forks, quiet)
        with Following(run_dir, on_step, agent.stop):
            agent.run()
        report = run_folder.load_report(run_dir, run)
        if run.launch.nodes == 1:
            progress.say(ending_in_words(run_dir, report))
        return report


def settle(
    run: RunConfig, run_dir: Path, accept_changes: bool, devices_of: Callable[[RunConfig], Devices], progress: Progress
) -> tuple[RunConfig, Plan]:
    """Prepare the data, enter the run's folder, choose the plan, and write both down. Return the complete run, and its
    plan. devices_of: returns the devices of all nodes of a run. Raises: UserError."""
    run_folder.check_before_preparing(run_dir, run, partial(devices_of, run))
    with progress.during("reading the data"):
        run, data = resolve(run, progress)
    run = run_folder.enter(run_dir, run, data.identity, accept_changes)
    with progress.during("finding devices"):
        devices = devices_of(run)
    with progress.during("choosing a plan"):
        plan = run_folder.settle_plan(run_dir, run, devices, progress.say)
    check_profile(run, plan)
    return run_folder.write(run_dir, run, plan, data.folders), plan


def told_if_finished(run_dir: Path, run: RunConfig, progress: Progress, events: Events | None) -> Report | None:
    """Return the report of a run that has made all of its steps, and say so; None if there are more to make. events:
    those of this process, which tells sinks what they lack; None: another node's does."""
    if (report := report_if_finished(run_dir, run)) is not None:
        progress.say(run_folder.finished_in_words(run_dir, run))
        if events is not None:
            tell_the_rest(run_dir, run, events)
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
    _check_here(run, run_dir, origin)
    run_folder.check_is_run_folder(run_dir)
    check_data(run)
    run = with_known_sizes(run)
    if report_if_finished(run_dir, run) is not None:
        return []
    prepare, would = run.data.prepare, []
    if prepare.input and not (prepare.out / MANIFEST).exists():
        would.append(f"prepare {', '.join(prepare.input)} in {prepare.out}")
    plan = run_folder.settle_plan(run_dir, run, devices_of_run(run), lambda words: None)
    check_profile(run, plan)
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


def report_if_finished(run_dir: Path, run: RunConfig) -> Report | None:
    """Return the report of a run that has made all of its steps; None if there are more to make."""
    if not (run_dir / "report.json").exists() or not committed(run_dir):
        return None
    report = Report.load(run_dir)
    return report if report.status == "finished" and report.steps == run.train.steps else None


def _check_here(run: RunConfig, run_dir: Path, origin: Callable[[str], str]) -> None:
    """Refuse, before anything takes time, a written plan that does not fit the nodes and processes that are said, and a
    place, certificate, profile or sinks that cannot be. Raises: UserError.
    """
    if size := processes_of(run.plan):
        nodes = run.launch.nodes
        check_size(run.plan, size, run.launch, nodes * (run.launch.processes or -(-size // nodes)), origin)
    check_place(run.launch)
    check_tls(run_dir, run.launch)
    check_profiled_steps(run)
    check_sinks(run.observe, run.extend)
