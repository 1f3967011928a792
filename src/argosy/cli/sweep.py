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

from argosy.cli.options import parse
from argosy.errors import RunFailed
from argosy.observe.terminal import lasting_output, printable
from argosy.sweep.executor import Asked
from argosy.sweep.executors.table import Place

if TYPE_CHECKING:
    from argosy.sweep.result import Result


@dataclass(frozen=True)
class Options:
    """Options of `argosy sweep`."""

    sweep: Annotated[Path, tyro.conf.Positional]
    """The sweep file."""
    on: Place = "local"
    """Where the trials run."""
    sweep_dir: Path | None = None
    """The sweep's folder; sweeps/NAME if not given."""
    show: bool = False
    """Show what is known so far, and start nothing."""
    json: bool = False
    """Print the result as one JSON object."""
    gpus_per_trial: int = 0
    """slurm, ray: GPUs of each trial."""
    time: str = ""
    """slurm: time limit of a trial, e.g. 24:00:00; it is requeued when that is over."""
    account: str = ""
    """slurm: the account that is charged."""
    partition: str = ""
    """slurm: the partition."""
    address: str = ""
    """ray: the cluster's dashboard, e.g. http://head:8265, or its head; empty: RAY_ADDRESS, else this machine's."""
    extra: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """slurm, ray: an option of sbatch or `ray job submit` that is passed through, e.g. --extra=--constraint=h100."""


@lasting_output()
def main(argv: list[str]) -> None:
    options = parse(argv, "argosy sweep", Options)
    from argosy.sweep.load import load_sweep
    from argosy.sweep.run import run_sweep, show_sweep

    sweep = load_sweep(options.sweep)
    folder = (options.sweep_dir or Path("sweeps") / sweep.config.name).absolute()
    if options.show:
        result = show_sweep(sweep, folder)
    else:
        asked = Asked(
            gpus=options.gpus_per_trial,
            time=options.time,
            account=options.account,
            partition=options.partition,
            address=options.address,
            extra=options.extra,
        )
        result = run_sweep(sweep, folder, options.on, asked, quiet=options.json)
    print(result.json() if options.json else printable(result.in_words()))
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
