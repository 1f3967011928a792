"""Launch a run where it goes on without this shell: on this machine, on hosts that ssh reaches, or on a cluster.

Each node has an agent, which is started again until the run has ended. `argosy runs`, `argosy logs RUN` and `argosy
stop RUN` go on from there.

Examples:
  argosy launch run.toml --on slurm --nodes 4 --gpus-per-node 8 --time 24:00:00
  argosy launch run.toml --on slurm --nodes 4 --dry-run                    print the job, submit nothing
  argosy launch run.toml --on slurm --extra=--constraint=h100              a line for sbatch
  argosy launch run.toml --on ssh --hosts node1,node2
  argosy launch run.toml --on kubernetes --nodes 4 --gpus-per-node 8 --image registry/argosy:1 --volume shared
  argosy launch run.toml --on ray --nodes 4 --gpus-per-node 8 --address http://head:8265
  argosy launch run.toml                                                   on this machine
  argosy launch sites.toml                                    each of [[sites]] by its table `launch` (docs/sites.md)
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from argosy.cli.documents import DryRun, write
from argosy.cli.options import parse_run
from argosy.config.launch import LaunchOptions
from argosy.errors import UserError

if TYPE_CHECKING:
    from argosy.engines.engine import RunJob
    from argosy.engines.record import LaunchedJob


@dataclass(frozen=True, kw_only=True)
class Options(LaunchOptions):
    """Options of `argosy launch`: beside those of the engine, what only the command line says."""

    extra: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    here: bool = False
    """Start a site whose table `launch` names a login on this machine: it is the one to log in on."""
    dry_run: bool = False
    """Print what would be submitted, and submit nothing."""
    run_dir: Path | None = None
    """The run's folder; runs/NAME if not given."""
    json: bool = False
    """Print JSON; of sites, a job a line."""


@dataclass(frozen=True)
class LaunchedRun:
    """A run, or a site of one, that was launched."""

    run: str
    folder: Path
    engine: str
    job: str


def main(argv: list[str]) -> int:
    """`argosy launch RUN ...`."""
    from argosy.engines.engine import RunJob
    from argosy.engines.table import ENGINES
    from argosy.launch.launching import launch
    from argosy.launch.ray_job import hold, job_here
    from argosy.launch.run_folder import check_is_run_folder
    from argosy.launch.sites import are_jobs, requests

    options, run = parse_run(argv, "argosy launch", Options)
    if options.nodes < 1 or min(options.cpus_per_node, options.gpus_per_node) < 0:
        raise UserError("--nodes must be at least 1, --cpus-per-node and --gpus-per-node at least 0. Try --nodes 1.")
    run_dir = (options.run_dir or Path("runs") / run.name).absolute()
    request = RunJob(
        run=run, run_dir=run_dir, words=tuple(_words_of_train(argv)), work_dir=Path.cwd(), **options.for_engine()
    )
    job_id = job_here() if options.on == "ray" else ""
    is_of_sites = are_jobs(run)
    parts: list[tuple[str, str, RunJob]] = [("", options.on, request)]
    if is_of_sites:
        parts = requests(request, options.on, options.here or bool(job_id and run.site))
    if options.dry_run:
        _show_scripts(parts, options.json)
        return 0
    (_, on, request), *others = parts
    if job_id and on == "ray" and not others:
        ENGINES["ray"]().check(request)
        check_is_run_folder(request.run_dir)
        return hold(request, job_id)
    if is_of_sites:
        _launch_sites(parts, options.json)
        return 0
    job = launch(request, on)
    _tell(request, job, options.json)
    if not options.json:
        print(what_next(run_dir))
    return 0


def _show_scripts(sites: Sequence[tuple[str, str, RunJob]], is_json: bool) -> None:
    """Print what would be submitted for the run, or for each of its sites. Raises: UserError if an engine refuses."""
    from argosy.engines.table import ENGINES

    scripts = {}
    for name, on, request in sites:
        engine = ENGINES[on]()
        engine.check(request)
        scripts[name or request.name] = engine.script(request)
    if is_json:
        would = tuple(f"launch {request.name} on {on}, in {request.run_dir}" for _, on, request in sites)
        write("dry-run", DryRun(would, sites[0][2].run_dir, scripts))
        return
    for (name, on, _), script in zip(sites, scripts.values(), strict=True):
        print(f"# site {name}, on {on}\n{script}" if name else script, end="\n" if name else "")


def _launch_sites(sites: Sequence[tuple[str, str, RunJob]], is_json: bool) -> None:
    from argosy.launch.launching import launch_sites
    from argosy.sync.layout import home_of

    for request, job in launch_sites(sites):
        _tell(request, job, is_json)
    if not is_json:
        print(what_next(home_of(sites[0][2].run_dir) if len(sites) > 1 else sites[0][2].run_dir))


def _tell(request: RunJob, job: LaunchedJob, is_json: bool) -> None:
    if is_json:
        write("launch", LaunchedRun(request.name, request.run_dir, job.engine, job.id))
    else:
        print(f"launched {request.name} on {job.engine}: job {job.id}, in {request.run_dir}", flush=True)


def what_next(run_dir: Path) -> str:
    folder = shlex.quote(str(run_dir))
    return f"next: argosy logs {folder} -f     argosy runs     argosy stop {folder}"


def _words_of_train(argv: list[str]) -> list[str]:
    """Return the words of `argv` that are not options of this command, but the run file and keys of the run."""
    own = {f"--{field.name.replace('_', '-')}" for field in fields(Options)}
    words, is_own = [], False
    for word in argv:
        if word.startswith("--") and "." not in word.split("=")[0]:
            is_own = word.split("=")[0].replace("_", "-") in own
        elif word.startswith("--"):
            is_own = False
        if not is_own:
            words.append(word)
    return words
