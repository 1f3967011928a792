"""Train a model: a run file, a run preset, or without either the built-in demo.

It starts its own processes on this machine, and with srun on each node; under torchrun it joins the ones that
torchrun started. The same command again goes on from the newest checkpoint in the run's folder.

Examples:
  argosy train                                            the demo: prepares data, trains for some minutes
  argosy train run.toml                                   your run; its folder is runs/NAME
  argosy train run.toml --run-dir runs/b --optimizer.lr 1e-3
  argosy train run.toml --launch.processes 2 --plan dp_replicate=2,microbatch=4
  srun --ntasks-per-node 1 argosy train run.toml          on all nodes of a SLURM job
  argosy train run.toml --site oslo                       one of several sites (docs/sites.md)
  torchrun --nproc-per-node 2 -m argosy train run.toml    in the processes of torchrun
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.observe.terminal import lasting_output
from argosy.processes.child import tie_to_starter
from argosy.processes.fork_server import WORKER_MODULE, ForkServer

if TYPE_CHECKING:
    from argosy.config.schema import RunConfig

STARTS_NOTHING = ("-h", "--help", "--help-all", "--dry-run", "--dry_run")
"""Words with which no process is started."""
PROFILE_SHORT, PROFILE_LONG = "--profile", "--observe.profile.steps"


@dataclass(frozen=True)
class Options:
    run_dir: Path | None = None
    """The run's folder; runs/NAME if not given."""
    accept_changes: bool = False
    """Go on from the folder's checkpoint although data, batch or optimizer settings have changed since."""
    profile: str = ""
    """Record these steps with torch's profiler, as FIRST:END; the same as --observe.profile.steps."""
    dry_run: bool = False
    """Say what would be prepared, started and trained, as far as that is known before, and do nothing."""
    json: bool = False
    """Print JSON: the report. A parameter server has none."""


@lasting_output()  # a run goes on when the reader of its output does not
def main(argv: list[str]) -> None:
    tie_to_starter()
    # Half a second of its own imports is still to come: the fork server imports torch meanwhile.
    starts = "RANK" not in os.environ and not any(word in STARTS_NOTHING for word in argv)
    with closing(ForkServer(WORKER_MODULE)) if starts else nullcontext() as forks:
        _train(argv, forks)


def _train(argv: list[str], forks: ForkServer | None) -> None:
    from argosy.cli.documents import DryRun, show_dry_run, write
    from argosy.cli.options import origin, parse_run
    from argosy.engines.slurm import is_first_task, with_nodes_of_srun
    from argosy.plan.plan import is_asynchronous
    from argosy.sync.layout import is_server

    argv = [
        word.replace(PROFILE_SHORT, PROFILE_LONG)
        if word == PROFILE_SHORT or word.startswith(f"{PROFILE_SHORT}=")
        else word
        for word in argv
    ]
    options, run = parse_run(argv, "argosy train", Options)
    if options.dry_run:
        from argosy.launch.local import would_train
        from argosy.launch.run_folder import finished_in_words

        folder = (options.run_dir or Path("runs") / run.name).absolute()
        run = with_nodes_of_srun(run, os.environ)
        would = DryRun(tuple(would_train(run, folder, partial(origin, argv))), folder)
        show_dry_run(would, options.json, finished_in_words(folder, run))
        return
    if "RANK" in os.environ:
        from argosy.launch.joined import train_joined

        joined = train_joined(run, options.run_dir, accept_changes=options.accept_changes)
        if joined is not None and options.json:
            write("train", joined)
        elif joined is not None:
            print(_what_next(options.run_dir or Path("runs") / run.name, run))
        return
    from argosy.launch.local import train

    if is_server(run):
        from argosy.launch.servers import serve

        if forks is not None:
            forks.close()
        serve(run, options.run_dir, accept_changes=options.accept_changes)
        return
    run = with_nodes_of_srun(run, os.environ)
    changes = options.accept_changes
    report = train(run, options.run_dir, accept_changes=changes, origin=partial(origin, argv), started=forks)
    if options.json:
        write("train", report)
    elif report.status == "finished" and not (run.site and is_asynchronous(run.plan)) and is_first_task(os.environ):
        print(_what_next(report.run_dir, run) if argv else _what_next_after_the_demo(report.run_dir))


def _what_next(run_dir: Path, run: RunConfig) -> str:
    folder, objective = shlex.quote(os.path.relpath(run_dir)), run.train.objective
    if objective == "reward":  # its model ends with a score, and not with words
        return f"next: {_argosy()} evaluate {folder}"
    if objective != "pretrain":
        return f"next: {_argosy()} chat {folder}"
    prompt = run.evaluate.sample_prompt or "Once upon a time"
    return f"next: {_argosy()} generate {folder} --prompt {shlex.quote(prompt)}"


def _argosy() -> str:
    """Return the command as it can be typed here; also of a process that was started as `python -m argosy`."""
    if shutil.which("argosy"):
        return "argosy"
    beside = Path(sys.executable).with_name("argosy")
    return shlex.quote(str(beside)) if os.access(beside, os.X_OK) else f"{shlex.quote(sys.executable)} -m argosy"


def _what_next_after_the_demo(run_dir: Path) -> str:
    argosy = _argosy()
    commands = {
        f'{argosy} generate {os.path.relpath(run_dir)} --prompt "class "': "let it write",
        f"{argosy} train --train.minutes 30 --run-dir runs/longer": "train longer",
        f"{argosy} config show --name mine > my.toml": "a run file of your own to start from",
    }
    width = max(map(len, commands))
    return "\n".join(["next:", *(f"  {command:{width}}   {why}" for command, why in commands.items())])
