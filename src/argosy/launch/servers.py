"""Asynchronous runs: one worker's part, one parameter server's part, and all of them on this machine by one command."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from argosy.checkpoint.store import saved_step
from argosy.config.dump import save_run
from argosy.config.load import RUN_FILE, load
from argosy.config.observe import ObserveConfig
from argosy.config.schema import RunConfig
from argosy.config.sync import server_name, server_number
from argosy.errors import Interrupted, RunFailed, UserError, counted, error_of
from argosy.extend.loading import approve
from argosy.faults import RUN_DIR
from argosy.files import make_folder
from argosy.launch import run_folder
from argosy.launch.children import check_codes, free_port, started, supervise
from argosy.launch.resolve import resolve
from argosy.observe.events import Events
from argosy.observe.report import Report
from argosy.observe.screen import Progress
from argosy.plan.plan import NO_WORKERS, Plan, is_asynchronous
from argosy.processes.child import Child, Message
from argosy.processes.supervisor import ChildEnd, RestartPolicy, Supervisor
from argosy.sync.layout import RESTARTED, ServerLayout, group_folder, home_of, site_folder
from argosy.sync.links import keys_of
from argosy.training.stop import StopSignal

SERVER_MODULE = "argosy.training.server.main"
SERVERS_PLAN = Plan.parse("sync=async")
"""Text of the plan.toml of the whole run: each worker has a plan of its own."""
SERVER_RESTARTS = RestartPolicy(most_failures=5, pause_s=1.0, progress_s=10.0, finish_s=120.0)
"""The restarts of a server. finish_s: it may take so long to save."""
SIGNAL_LOOK_S = 0.2
"""Interval between looks for a signal."""
SERVED = ("loss", "optimizer", "family", "sink")
"""Kinds of the user's code that asynchronous runs have."""


def settle_worker(run: RunConfig, run_dir: Path) -> tuple[RunConfig, Path]:
    """Return a worker's own run and its folder. Raises: UserError if the run cannot be asynchronous."""
    run_dir = site_folder(run_dir, run.site)
    group = group_folder(run_dir)
    check(run)
    run = _with_addresses(run, group)
    own = next(site for site in run.sites if site.name == run.site)
    update: dict[str, object] = {"plan": own.plan} if own.plan else {}
    if own.processes:
        update["launch"] = {"processes": own.processes}
    make_folder(group)
    keys_of(run, group)
    return run.with_keys(**update), run_dir


def check(run: RunConfig) -> None:
    """Refuse what an asynchronous run does not do. Raises: UserError."""
    if not run.sites:
        raise UserError(NO_WORKERS)
    if not run.train.steps or run.train.epochs:
        raise UserError(
            "train.minutes or train.epochs with plan.sync = async: say how many updates to make. Give train.steps."
        )
    if run.train.batch_ramp:
        raise UserError("train.batch_ramp with plan.sync = async: all updates have one batch. Leave it out.")
    _check_local_steps(run)
    for site in run.sites:
        if site.batch:
            raise UserError(
                f"sites.batch = {site.batch} of {site.name} with plan.sync = async: each update is one worker's, from "
                "train.global_batch sequences; a slow worker makes fewer updates. Leave it out."
            )
        if site.plan and not is_asynchronous(site.plan):
            raise UserError(f'sites.plan = "{site.plan}" of {site.name}: add sync=async, as the run has it.')
    for code in run.extend.code:
        for declaration in code.declarations:
            if declaration.kind not in SERVED:
                raise UserError(
                    f"plan.sync = async with the {declaration} ({declaration.place}): no worker sees the run's steps. "
                    "Leave it out."
                )
    norms = run.observe.norms_every_steps  # the usual number is in every run file that was written out
    for key, value in {
        "resilience.replay_check_every_steps": run.resilience.replay_check_every_steps,
        "resilience.check_collectives": run.resilience.check_collectives,
        "resilience.rebalance": run.resilience.rebalance,
        "observe.noise_scale_every_steps": run.observe.noise_scale_every_steps,
        "observe.sample_every_steps": run.observe.sample_every_steps,
        "observe.norms_every_steps": 0 if norms == ObserveConfig().norms_every_steps else norms,
        "observe.profile.steps": run.observe.profile.steps,
        "sync.from_step": run.sync.from_step,
        "sync.fragments": run.sync.fragments if run.sync.fragments > 1 else 0,
        "sync.overlap_steps": run.sync.overlap_steps,
        "train.pause_at": run.train.pause_at,
    }.items():
        if value:
            raise UserError(f"{key} = {value} is not supported with plan.sync = async. Remove it.")
    layout = ServerLayout(run)
    if run.model.vocab_size and any(not flat.shapes for flat in layout.flats):
        raise UserError(
            f"sync.servers, sync.shards: {layout.servers} servers are more than the model has parameters "
            f"({sum(len(flat.shapes) for flat in layout.flats)}). Take fewer."
        )


def _check_local_steps(run: RunConfig) -> None:
    steps, local = run.train.steps, run.sync.local_steps
    if left := steps % local:
        raise UserError(
            f"train.steps = {steps} is no multiple of sync.local_steps = {local}: each update is made from as many. "
            f"Try train.steps = {max(steps - left, local)}."
        )


def check_addresses_of_servers(run: RunConfig) -> None:
    """Raises: UserError if the parameter servers have no addresses, or `run.site` is a server that has none."""
    servers = len(run.sync.servers)
    if not servers:
        raise UserError(
            "sync.servers is empty: give each parameter server an address, HOST:PORT, at which workers reach it; only "
            "where one command starts all on this machine are they chosen."
        )
    if (server_number(run.site) or 0) >= servers:
        words = f"sync.servers has {counted(servers, 'address', 'es')}; try {server_name(servers - 1)}"
        raise UserError(f'site = "{run.site}": {words}')


def serve(run: RunConfig, run_dir: Path | None, *, accept_changes: bool = False) -> None:
    """Hold one parameter server of `run` until the run is over; it is started again if it dies.

    Raises: UserError, RunFailed; Interrupted after SIGTERM or SIGINT, once its state is saved.
    """
    run_dir = home_of((run_dir or Path("runs") / run.name).absolute())
    if not is_asynchronous(run.plan):
        raise UserError(f'site = "{run.site}": only a run with plan.sync = async has parameter servers')
    check(run)
    approve(run.extend.code)
    run = _with_addresses(run, run_dir)
    number, servers = server_number(run.site), len(run.sync.servers)
    assert number is not None
    stop = StopSignal().listen()
    with run_folder.locked(run_dir, run.site, servers + 1):
        progress = Progress(enabled=True)
        keys_of(run, run_dir)
        with run_folder.settling(run_dir):
            run, data = resolve(run, progress)
            check(run)
            run = run_folder.enter(run_dir, run, data.identity, accept_changes)
            written = run.model_copy(update={"site": ""})
            run_folder.write(run_dir, written, SERVERS_PLAN, data.folders)
        progress.close()
        if saved_step(run_dir) >= run.train.steps:
            progress.say(run_folder.finished_in_words(run_dir, run))
            return
        _hold(run_dir, number, run.site, stop)


def train_parts(run: RunConfig, run_dir: Path, *, accept_changes: bool, quiet: bool) -> Report:
    """Hold all servers and workers of `run` on this machine; return the report of a worker that scored the model.

    A part that dies does not stop the others. Raises: UserError, RunFailed, Interrupted.
    """
    check(run)
    progress = Progress(enabled=not quiet)
    with run_folder.making_home(run_dir):
        keys_of(run, run_dir)
        run, _ = resolve(run, progress)  # once, not by each part at the same time
        check(run)
        progress.close()
        if not run.sync.servers:
            servers = tuple(f"127.0.0.1:{free_port()}" for _ in range(run.sync.shards))
            run = run.with_keys(sync={"servers": servers})
        asked = run_dir / "asked.toml"
        save_run(run, asked)
        if saved_step(run_dir) >= run.train.steps:
            progress.say(run_folder.finished_in_words(run_dir, run))
            return _report(run_dir, run)
        names = [server_name(number) for number in range(len(run.sync.servers))]
        with started([site.name for site in run.sites], asked, run_dir, accept_changes, names) as children:
            codes = supervise(children, quiet, servers=names)
        if saved_step(run_dir) < run.train.steps:  # else it does not matter what became of workers
            check_codes(codes, "the servers have saved", run_dir)
        return _report(run_dir, run)


def _report(run_dir: Path, run: RunConfig) -> Report:
    reports = []
    for site in run.sites:
        with suppress(OSError, UserError):
            reports.append(Report.load(site_folder(run_dir, site.name)))
    if not reports:
        raise RunFailed(f"{run_dir}: the servers came to the end, and no worker has left a report")
    best = max(reports, key=lambda report: (report.validation is not None, report.steps))
    return best.model_copy(update={"run_dir": run_dir})


def _with_addresses(run: RunConfig, group: Path) -> RunConfig:
    """Fill in the addresses that the command that started all parts has chosen. Raises: UserError if there are none."""
    path = group / RUN_FILE
    if not run.sync.servers and path.exists():
        servers = load(path).sync.servers
        run = run.with_keys(sync={"servers": servers})
    check_addresses_of_servers(run)
    return run


def _hold(run_dir: Path, number: int, name: str, stop: StopSignal) -> None:
    """Supervise the server's process until it says that the run is over."""
    events, said = Events(run_dir, f"{name}-holder"), Progress(enabled=True)
    last: list[Message] = []

    def start() -> Child:
        words = (str(run_dir), str(number), *([RESTARTED] if server.starts > 1 else []))
        return Child(SERVER_MODULE, *words, environment={RUN_DIR: str(run_dir)})

    def heard(message: Message) -> None:
        if message["kind"] in ("done", "failed"):
            last.append(message)
            server.kill()

    def ended(end: ChildEnd) -> None:
        if last:
            return
        if stop.number is not None:
            raise Interrupted(f"it died while it saved ({end.why}); the same command goes on", stop.number)
        events.write("server_died", why=end.why)
        if end.again_s is None:
            raise RunFailed(
                f"{name} died {server.failures} times within {SERVER_RESTARTS.progress_s:g} s of its start, at last by "
                f"{end.why}."
            )
        said.say(f"argosy: {name} died: {end.why}; it is started again, and goes on from the newest checkpoint")

    server = Supervisor(SERVER_RESTARTS, start, ended, heard)
    while not last:
        if stop.number is not None:
            server.tell_to_finish()
        if server.is_given_up:
            raise Interrupted("it was not running; the same command goes on", stop.number or signal.SIGTERM)
        server.keep()
        server.wait(SIGNAL_LOOK_S)
    if last[0]["kind"] == "failed":
        raise error_of(last[0]["code"], last[0]["text"])
    if not last[0]["finished"]:
        state = "its state is saved" if last[0]["saved"] else "the run goes back to its newest checkpoint"
        raise Interrupted(f"{state}; the same command goes on", stop.number or signal.SIGTERM)
