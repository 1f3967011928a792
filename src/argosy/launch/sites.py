"""Runs of several sites: one site's part of the run file, all sites on this machine by one command, each as a job on
the engine that its table `launch` names.

So is each parameter server of an asynchronous run, by its table in `sync.server_launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from argosy.checkpoint.store import saved_step
from argosy.config.dump import save_run
from argosy.config.load import RUN_FILE, load
from argosy.config.schema import RunConfig
from argosy.config.sync import SiteLaunch, server_name
from argosy.engines.engine import RunJob
from argosy.engines.login import Login, LoginJob
from argosy.errors import UserError
from argosy.files import make_folder
from argosy.launch.children import check_codes, free_port, started, supervise
from argosy.launch.resolve import resolve, with_known_sizes
from argosy.launch.run_folder import making_home
from argosy.launch.servers import check, check_addresses_of_servers, settle_worker, train_parts
from argosy.observe.report import Report
from argosy.observe.screen import Progress
from argosy.plan.hardware.local_machine import cluster_of
from argosy.plan.plan import NOT_OF_SITES, Plan, is_asynchronous, said_in, way_of_sites, with_sync
from argosy.plan.search.agreement import CHOSEN_KEYS, check_sites_of, choose_rounds
from argosy.plan.sync import LOCAL, USUAL_OF_SITES
from argosy.sync.layout import Sites, at_site, group_folder, site_folder
from argosy.sync.length import check_length
from argosy.sync.links import keys_of


def settle_site(run: RunConfig, run_dir: Path, say: Callable[[str], None]) -> tuple[RunConfig, Path]:
    """Return the site's own run and its folder, for a run with sites and its folder.

    say: told what was chosen for the run.

    Raises: UserError if the sites cannot train it.
    """
    if not run.site:
        raise UserError("the run has [[sites]], and no site is given. Say which one this is: --site NAME")
    if is_asynchronous(run.plan):
        return settle_worker(run, run_dir)
    run_dir = site_folder(run_dir, run.site)
    run = with_rounds(run, (run_dir, group_folder(run_dir)), say)
    run = checked(_with_addresses(run, group_folder(run_dir)))
    check_addresses(run)
    make_folder(group_folder(run_dir))
    keys_of(run, group_folder(run_dir))
    return run, run_dir


def with_rounds(run: RunConfig, folders: Sequence[Path], say: Callable[[str], None]) -> RunConfig:
    """Return the run with what `sync=auto` leaves open of how its sites agree.

    That stays as the first of `folders` has it that holds a run; in a new run it is chosen from the links between the
    sites, and `say` is told why. Raises: UserError if nobody has described them.
    """
    if not said_in(run.plan).sync_is_open:
        return run
    given = run.sync.model_fields_set
    before = next((load(folder / RUN_FILE).sync for folder in folders if (folder / RUN_FILE).exists()), None)
    if before is None:
        cluster = cluster_of(run)
        check_sites_of(run, cluster)
        assert cluster is not None
        chosen = choose_rounds(with_known_sizes(run), cluster, given)
        say(chosen.in_words())
        before = chosen.sync
    kept = {key: getattr(before, key) for key in CHOSEN_KEYS if key not in given}
    plans = [site.plan and with_sync(site.plan, USUAL_OF_SITES) for site in run.sites]
    return run.with_keys(
        sync=kept,
        plan=with_sync(run.plan, USUAL_OF_SITES),
        sites=tuple(s.with_keys(plan=p) for s, p in zip(run.sites, plans, strict=True)),
    )


def check_addresses(run: RunConfig) -> None:
    """Raises: UserError if a site has no address."""
    if missing := [site.name for site in run.sites if not site.address]:
        raise UserError(
            f"sites: no address of {', '.join(missing)} is given, HOST:PORT, at which others reach it. Give each site "
            "one; only where one command starts all sites on this machine are they chosen."
        )


def checked(run: RunConfig) -> RunConfig:
    """Return the run as its sites train it, with the batch of each. Raises: UserError if they cannot."""
    if not run.train.steps or run.train.epochs:
        raise UserError(
            "train.minutes or train.epochs with [[sites]]: all sites must end with the same step. "
            "Give train.steps instead."
        )
    if run.train.batch_ramp:
        raise UserError("train.batch_ramp with [[sites]]: rounds have batches of one size. Leave it out.")
    _check_plans(run)
    try:
        return at_site(run)
    except ValueError as problem:
        raise UserError(str(problem)) from None


def _check_plans(run: RunConfig) -> None:
    """Raises: UserError if a site's plan is none, or sites would not agree in one way."""
    way = way_of_sites(run.plan)
    if way not in LOCAL:
        raise UserError(NOT_OF_SITES.format(way))
    for site in run.sites:
        blamed = f'sites.plan = "{site.plan}" of {site.name}: '
        try:
            words = said_in(site.plan).words
            Plan.from_words(words)
        except UserError as problem:
            raise UserError(f"{blamed}{problem}") from None
        if words.get("sync", way) != way:
            raise UserError(
                f"{blamed}sync={words['sync']}, and the run's plan has sync={way}: all sites agree in one way. "
                "Leave sync out of the site's plan."
            )
    formats = sorted({str(said_in(site.plan or run.plan).words.get("weights", Plan().weights)) for site in run.sites})
    if run.sync.from_step and formats[1:]:
        raise UserError(
            f"sync.from_step = {run.sync.from_step}: until then all sites hold the same weights, and in their plans "
            f"weights are {' and '.join(formats)}. Give all plans one of them, or leave from_step out."
        )


def _with_addresses(run: RunConfig, group: Path) -> RunConfig:
    """Fill in the addresses that the command that started all sites has chosen."""
    path = group / RUN_FILE
    if all(site.address for site in run.sites) or not path.exists():
        return run
    known = {site.name: site.address for site in load(path).sites}
    sites = tuple(s.model_copy(update={"address": s.address or known.get(s.name, "")}) for s in run.sites)
    return run.model_copy(update={"sites": sites})


def train_sites(run: RunConfig, run_dir: Path, *, accept_changes: bool, quiet: bool) -> Report:
    """Train all sites of `run` on this machine, each in a process and a folder of its own; the first one's report.

    A site that dies does not stop the others. Raises: UserError, RunFailed if a site failed, Interrupted.
    """
    if is_asynchronous(run.plan):
        return train_parts(run, run_dir, accept_changes=accept_changes, quiet=quiet)
    progress = Progress(enabled=not quiet)
    run = checked(with_rounds(run, (run_dir,), progress.say))
    for site in run.sites:
        folder = site_folder(run_dir, site.name)
        check_length(folder, run, saved_step(folder))
    with making_home(run_dir):
        keys_of(run, run_dir)
        run, _ = resolve(_with_addresses(run, run_dir), progress)  # once, not by each site at the same time
        progress.close()
        sites = tuple(s.model_copy(update={"address": s.address or f"127.0.0.1:{free_port()}"}) for s in run.sites)
        run = run.model_copy(update={"sites": sites})
        save_run(run, run_dir / RUN_FILE)
        with started([site.name for site in run.sites], run_dir / RUN_FILE, run_dir, accept_changes) as children:
            codes = supervise(children, quiet, quorum=Sites.of(run, run_dir).quorum)
        check_codes(codes, "all sites have saved", run_dir)
    return Report.load(site_folder(run_dir, run.sites[0].name))


def are_jobs(run: RunConfig) -> bool:
    """Return True if each site of the run is to be launched by itself."""
    has_table = bool(run.sync.server_launch) or any(site.launch is not None for site in run.sites)
    return bool(run.sites) and (bool(run.site) or has_table)


def requests(request: RunJob, engine: str, is_here: bool = False) -> list[tuple[str, str, RunJob]]:
    """Return name, engine and request for each site to launch, given those of the whole run: of `run.site` or of all.

    Parameter servers come first. A part without a table `launch` takes what the command says. is_here: no matter which
    machine the table names.

    Raises: UserError if the sites cannot train the run, or have no addresses.
    """
    run = request.run
    servers: dict[str, SiteLaunch | None] = {}
    if is_asynchronous(run.plan):
        check(run)
        check_addresses_of_servers(run)
        servers = _tables_of_servers(run)
    else:
        check_addresses(checked(run))
    tables = servers | {site.name: site.launch for site in run.sites}
    chosen = [name for name in tables if run.site in ("", name)]
    found = [(name, *_request(request, engine, name, tables[name], is_here)) for name in chosen]
    for name, on, own in found:
        if name in servers:
            _check_server(name, on, own)
    return found


def _tables_of_servers(run: RunConfig) -> dict[str, SiteLaunch | None]:
    """Return the table `launch` of each parameter server. Raises: UserError if there are more or fewer than servers."""
    servers, tables = len(run.sync.servers), run.sync.server_launch
    if len(tables) not in (0, 1, servers):
        raise UserError(
            f"sync.server_launch has {len(tables)} tables, and sync.servers names {servers}. Give each server one, or "
            "all of them a single one."
        )
    each: list[SiteLaunch | None] = list(tables)
    if len(each) != servers:
        each = (each or [None]) * servers
    return {server_name(number): table for number, table in enumerate(each)}


def _check_server(name: str, on: str, request: RunJob) -> None:
    """Raises: UserError for what a parameter server, which is one process, cannot use."""
    if on == "ray":
        raise UserError(
            f"{name}: on = ray starts processes on any machine of the cluster, and a parameter server has to be at its "
            "address in sync.servers. Name another engine in sync.server_launch."
        )
    if request.nodes > 1 or "," in request.hosts:
        raise UserError(
            f"{name}: a parameter server is one process, and is given more than one machine. Give each server a "
            "table in sync.server_launch, with one machine."
        )


def _request(request: RunJob, engine: str, name: str, launch: SiteLaunch | None, is_here: bool) -> tuple[str, RunJob]:
    words = request.words if request.run.site else (*request.words, "--site", name)
    run_dir = site_folder(request.run_dir, name)
    own = replace(request, run=request.run.model_copy(update={"site": name}), run_dir=run_dir, words=words)
    if launch is None:
        return engine, own
    if launch.login and not is_here:
        group = group_folder(run_dir)
        group_there = Path(launch.folder) / "runs" / group.name
        return Login.name, LoginJob(
            **vars(own), login=launch.login, login_options=launch.login_options, there=launch.folder,
            program=launch.argosy, group=group, group_there=group_there, run_dir_there=site_folder(group_there, name),
        )  # fmt: skip
    return launch.on, replace(own, **launch.for_engine())
