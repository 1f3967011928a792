"""Launching the sites of a run: each is a job of its own, on the engine that its table `launch` names."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from argosy.config.schema import RunConfig
from argosy.config.sites import SiteConfig
from argosy.errors import UserError
from argosy.launch.engines.engine import Job, Request
from argosy.launch.engines.login import Login
from argosy.launch.engines.table import engine_of
from argosy.launch.sites import check_addresses, checked
from argosy.sync.sites.layout import SITES, site_folder

OF_AN_ENGINE = ("nodes", "cpus_per_node", "gpus_per_node", "memory_per_node", "time", "account", "partition", "hosts",
                "address", "namespace", "volume", "image", "extra")  # fmt: skip
"""Keys of a site's table `launch` that are options of the command."""


def are_jobs(run: RunConfig) -> bool:
    """Return True if each site of the run is to be launched by itself."""
    return bool(run.sites) and (bool(run.site) or any(site.launch is not None for site in run.sites))


def requests(request: Request, engine: str, is_here: bool = False) -> list[tuple[str, str, Request]]:
    """Return site, engine and request for each site to launch, given those of the whole run: of `run.site` or of all.

    A site without a table `launch` takes what the command says. is_here: no matter which machine the table names.

    Raises: UserError if the sites cannot train the run, or have no addresses.
    """
    run = checked(request.run)
    check_addresses(run)
    chosen = [site for site in run.sites if run.site in ("", site.name)]
    return [(site.name, *_request(request, engine, site, is_here)) for site in chosen]


def _request(request: Request, engine: str, site: SiteConfig, is_here: bool) -> tuple[str, Request]:
    words = request.words if request.run.site else (*request.words, "--site", site.name)
    run_dir = site_folder(request.run_dir, site.name)
    own = replace(request, run=request.run.model_copy(update={"site": site.name}), run_dir=run_dir, words=words)
    if (launch := site.launch) is None:
        return engine, own
    if launch.login and not is_here:
        there: dict[str, Any] = {"login": launch.login, "login_options": launch.login_options, "there": launch.folder}
        return Login.name, replace(own, **there, program=launch.argosy)
    given = {name: getattr(launch, name) for name in OF_AN_ENGINE}
    return launch.on, replace(own, **given)


def jobs_of(run_dir: Path) -> dict[str, Job]:
    """Return the jobs of a run: its own under "", or those of its sites by name, if these were launched.

    Raises: UserError if it has none.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such folder. `argosy runs` lists the runs here.")
    folders = {"": run_dir} | {path.name: path for path in sorted((run_dir / SITES).glob("*"))}
    jobs = {name: job for name, folder in folders.items() if (job := Job.load(folder)) is not None}
    if not jobs:
        raise UserError(f"{run_dir}: the run was not launched by `argosy launch`, so no engine knows it.")
    return {"": jobs[""]} if "" in jobs else jobs


def printed_by(jobs: Mapping[str, Job], follow: bool) -> Iterator[bytes]:
    """Yield what several jobs print, each line with the job's name before it; follow: until all have ended."""
    lines: SimpleQueue[bytes | None] = SimpleQueue()

    def read(name: str, job: Job) -> None:
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
