"""Launching the sites of a run: each is a job of its own, on the engine that its table `launch` names.

So is each parameter server of an asynchronous run, by its table in `sync.server_launch`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from argosy.config.schema import RunConfig
from argosy.config.servers import server_name
from argosy.config.sites import SiteLaunch
from argosy.engines.engine import RunJob
from argosy.engines.login import Login, LoginJob
from argosy.engines.record import FOLDER, RECORD, LaunchedJob
from argosy.engines.table import engine_of
from argosy.errors import UserError
from argosy.launch.servers import check, check_addresses_of_servers
from argosy.launch.sites import check_addresses, checked
from argosy.plan.plan import is_asynchronous
from argosy.sync.sites.layout import SITES, group_folder, site_folder


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


def are_there(run_dir: Path) -> bool:
    """Return True if the run or a part of it was launched."""
    return any((folder / FOLDER / RECORD).exists() for folder in (run_dir, *(run_dir / SITES).glob("*")))


def jobs_of(run_dir: Path) -> dict[str, LaunchedJob]:
    """Return the jobs of a run: its own under "", or those of its sites by name, if these were launched.

    Raises: UserError if it has none.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such folder. `argosy runs` lists the runs here.")
    folders = {"": run_dir} | {path.name: path for path in sorted((run_dir / SITES).glob("*"))}
    jobs = {name: job for name, folder in folders.items() if (job := LaunchedJob.load(folder)) is not None}
    if not jobs:
        raise UserError(f"{run_dir}: the run was not launched by `argosy launch`, so no engine knows it.")
    return {"": jobs[""]} if "" in jobs else jobs


def printed_by(jobs: Mapping[str, LaunchedJob], follow: bool) -> Iterator[bytes]:
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
