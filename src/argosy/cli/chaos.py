"""Train a run twice, undisturbed and while its processes are killed, and compare the results.

The first training shows how long the run takes and what its weights should be. The second one meets faults at times
that --fault-seed determines: kills and stops of workers, of the process that writes checkpoints, of the coordinator and
of the command itself, and kills at fault points inside a step. A first training that is finished already is reused.

The exit code is 0 if the weights are the same bit for bit, every sample was trained on once and nothing is left
behind, else 1.

Examples:
  argosy chaos run.toml --fault-seed 7 --minutes 30
  argosy chaos run.toml --fault-seed 7 --every-s 20 --kinds kill stop
  argosy chaos run.toml --json
"""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from argosy.cli.documents import DryRun, answer, show_dry_run
from argosy.cli.options import HELP_ALL, TrustCode, parse_run
from argosy.config.identity import check_repeatable
from argosy.errors import UserError
from argosy.extend.loading import check_approved
from argosy.faults import FAULT_POINTS, FAULTS_VARIABLE
from argosy.observe.terminal import lasting_output


@dataclass(frozen=True)
class Options:
    fault_seed: int = 0
    """Determines the faults and their times; --seed is the run's own."""
    minutes: float = 0.0
    """Length of the undisturbed training; 0: as many steps as the run says."""
    every_s: float = 60.0
    """Seconds between faults, on average."""
    kinds: tuple[str, ...] = ()
    """Kinds of faults, as above; none given: all."""
    folder: Path | None = None
    """Folder of both trainings; runs/NAME-chaos if not given."""
    trust_code: TrustCode = False
    dry_run: bool = False
    """Say what would be trained and how it would be disturbed, and do nothing."""
    json: bool = False
    """Print the report as JSON."""


@lasting_output()
def main(argv: list[str]) -> int:
    options, run = parse_run(argv, "argosy chaos", Options, _about(points=HELP_ALL in argv))
    if not 0 < options.every_s < math.inf:
        raise UserError(f"--every-s {options.every_s:g}: must be more than 0. Try --every-s 60.")
    if not 0 <= options.minutes < math.inf:
        raise UserError(f"--minutes {options.minutes:g}: must be at least 0. Try --minutes 30.")
    if run.launch.nodes > 1:
        raise UserError(
            f"launch.nodes = {run.launch.nodes}: chaos disturbs a run of this machine, which would wait for others. "
            "Give --launch.nodes 1."
        )
    check_repeatable(run, run.name)
    check_approved(run.extend.code, options.trust_code)
    from argosy.chaos.campaign import KINDS
    from argosy.chaos.run import run_chaos
    from argosy.config.dump import dump, save_run
    from argosy.files import made_folder

    if options.minutes:
        run = run.with_keys(train={"minutes": options.minutes, "steps": 0, "epochs": 0.0})
    folder = (options.folder or Path("runs") / f"{run.name}-chaos").absolute()
    _check_run_file(folder, dump(run))
    if options.dry_run:
        show_dry_run(_would(folder, options), options.json)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run it started is ended
    seed, kinds = options.fault_seed, options.kinds or tuple(KINDS)
    with made_folder(folder):
        save_run(run, folder / "run.toml")
        report = run_chaos(folder / "run.toml", folder, seed=seed, every_s=options.every_s, kinds=kinds)
    (folder / f"seed-{seed}.json").write_text(report.model_dump_json(indent=1) + "\n")
    answer(options.json, "chaos", report.in_words(), report)
    return 0 if report.is_passed else 1


def _check_run_file(folder: Path, text: str) -> None:
    """Raises: UserError if a run.toml there, which would be replaced, is not that of chaos: a run's, or the user's."""
    path = folder / "run.toml"
    if path.exists() and not (folder / "reference").exists() and path.read_text() != text:
        raise UserError(f"{path} would be replaced. Choose another --folder, which chaos has for itself.")


def _about(points: bool) -> str:
    """Return the description in --help: the kinds of faults, and with --help-all the fault points."""
    from argosy.chaos.campaign import KINDS

    kinds = "\n".join(f"  {name:<11}  {kind.about}" for name, kind in KINDS.items())
    about = f"{__doc__}\nKinds of faults:\n{kinds}"
    if not points:
        return f"{about}\n\n--help-all lists the fault points of {FAULTS_VARIABLE} too."
    return f"{about}\n\nFault points of {FAULTS_VARIABLE}:\n" + "\n".join(
        f"  {n:<11}  {where}" for n, where in FAULT_POINTS.items()
    )


def _would(folder: Path, options: Options) -> DryRun:
    from argosy.chaos.run import check_chaos

    chaos = check_chaos(folder, options.fault_seed, options.kinds)
    done = (folder / "reference" / "report.json").exists()
    undisturbed = (
        f"compare with the training in {folder / 'reference'}, which is there"
        if done
        else (f"train undisturbed in {folder / 'reference'}")
    )
    kinds = f" ({', '.join(options.kinds)})" if options.kinds else ""
    disturbed = f"train again in {chaos}, with a fault{kinds} every {options.every_s:g} s on average"
    return DryRun((undisturbed, disturbed), folder)
