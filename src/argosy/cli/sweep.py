"""Train many runs that differ in some keys, and find the best: grid, random, Bayesian search, successive halving.

SWEEP.toml names a run and the keys of it that vary. Each trial is a run of its own in sweeps/NAME/NUMBER, which `argosy
watch`, `runs` and `logs` show. The same command again goes on where the sweep was stopped or killed.

Examples:
  argosy sweep sweep.toml                    trials on this machine, as many at a time as it has room for
  argosy sweep sweep.toml --on slurm         trials as tasks of SLURM array jobs
  argosy sweep sweep.toml --on ray           trials as jobs of a Ray cluster
  argosy sweep sweep.toml --show             the table so far, and the plot
  argosy sweep sweep.toml --show --json      for a program
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from argosy.cli.documents import DryRun, answer, show_dry_run
from argosy.cli.options import PrintJson, parse
from argosy.config.launch import ClusterOptions, ProgramEngine
from argosy.errors import RunFailed, UserError
from argosy.observe.terminal import lasting_output

if TYPE_CHECKING:
    from argosy.sweep.result import Result


@dataclass(frozen=True, kw_only=True)
class _SweepOptions:
    sweep: Annotated[Path, tyro.conf.Positional]
    """The sweep file."""
    on: ProgramEngine = "local"
    """Engine that runs the trials."""
    sweep_dir: Path | None = None
    """The sweep's folder; sweeps/NAME if not given."""
    show: bool = False
    """Show what is known so far, and start nothing."""
    dry_run: bool = False
    """Say what would be trained, and where, and start nothing."""
    json: PrintJson = False
    gpus_per_trial: int = 0
    """slurm, ray: GPUs of each trial."""


@dataclass(frozen=True, kw_only=True)
class Options(ClusterOptions, _SweepOptions):
    """Options of `argosy sweep`, and at last those of a cluster."""

    extra: tyro.conf.UseAppendAction[tuple[str, ...]] = ()


@lasting_output()
def main(argv: list[str]) -> None:
    options = parse(argv, "argosy sweep", Options)
    if options.gpus_per_trial < 0:
        raise UserError(f"--gpus-per-trial {options.gpus_per_trial}: must be at least 0. Try --gpus-per-trial 1.")
    from argosy.sweep.driver import run_sweep, show_sweep, would_sweep
    from argosy.sweep.load import load_sweep

    sweep = load_sweep(options.sweep)
    folder = (options.sweep_dir or Path("sweeps") / sweep.config.name).absolute()
    where = options.launch_options(on=options.on, gpus_per_node=options.gpus_per_trial)
    if options.dry_run:
        show_dry_run(DryRun(tuple(would_sweep(sweep, folder, where)), folder), options.json)
        return
    result = show_sweep(sweep, folder) if options.show else run_sweep(sweep, folder, where)
    answer(options.json, "sweep", result.in_words(), result.record())
    if options.show:
        return
    if result.best is None:
        raise RunFailed(f"no trial has come to its end; the table says why. Their logs are in {folder}.")
    if not options.json:
        print(_what_next(result))


def _what_next(result: Result) -> str:
    folder = Path(os.path.relpath(result.folder))
    best = shlex.quote(str(folder / "best.toml"))
    return f"plot: {folder / 'trials.svg'}\nnext: argosy train {best}"
