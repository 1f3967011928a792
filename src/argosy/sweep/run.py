"""A sweep from its file to its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from argosy.compare.results import SWEEP_FILE
from argosy.errors import UserError
from argosy.extend.trust import approve
from argosy.launch.resolve import prepare_shown
from argosy.observe.screen import Progress
from argosy.sweep.driver import Driver
from argosy.sweep.executor import Asked
from argosy.sweep.executors.table import Place, executor_on, limits_on
from argosy.sweep.folder import check_is_same, enter, locked
from argosy.sweep.load import Sweep
from argosy.sweep.needs import Limits, needs_of
from argosy.sweep.result import Result
from argosy.sweep.study import JOURNAL, Study, check_optuna


def run_sweep(sweep: Sweep, folder: Path, on: Place, asked: Asked, quiet: bool = False) -> Result:
    """Run a sweep, or go on with it, in its folder; return what it has found.

    Raises: UserError if it cannot be started as asked; RunFailed if its trials fail alike; Interrupted after SIGINT or
    SIGTERM, once its trials have saved.
    """
    check_optuna()
    approve(sweep.base.extend.code)
    limits = limits_on(on, sweep.config)
    progress = Progress(enabled=not quiet)
    executor = executor_on(on, sweep.config, folder, limits, asked)
    with locked(folder):
        enter(folder, sweep)
        study = Study(folder, sweep)
        _prepare_data(sweep, progress)
        driver = Driver(sweep, folder, study, executor, limits, progress.say)
        progress.say(f"sweep {sweep.config.name}: {driver.trials} trials in {folder}")
        if on == "local":
            _say_what_does_not_fit(sweep, limits, progress.say)
        try:
            driver.run()
        finally:
            result = Result.of(sweep, folder, study)
            result.write()
    return result


def show_sweep(sweep: Sweep, folder: Path) -> Result:
    """Return what a sweep has found so far, whether it runs or not. Raises: UserError if its folder is not there."""
    check_optuna()
    if not (folder / SWEEP_FILE).exists() or not (folder / JOURNAL).exists():
        raise UserError(f"{folder}: there is no sweep yet. Start it without --show.")
    check_is_same(folder, sweep)
    return Result.of(sweep, folder, Study(folder, sweep, may_write=False))


def _prepare_data(sweep: Sweep, progress: Progress) -> None:
    """Prepare the data that all trials read, once. Raises: UserError if there are none."""
    data = sweep.base.data
    if data.prepare.input:
        prepare_shown(sweep.base, progress)
        progress.close()
    elif not data.sources and not any(p.key.startswith("data") for p in sweep.parameters):
        raise UserError(
            f"{sweep.path}: its run has no data to train on. Give data.sources (folders that `argosy prepare` wrote), "
            "or data.prepare.input (text to prepare)."
        )


def _say_what_does_not_fit(sweep: Sweep, limits: Limits, say: Callable[[str], None]) -> None:
    """Warn if a trial alone is predicted to take more memory than there is for all."""
    try:
        needs = needs_of(sweep.base, limits)
    except UserError:  # only some of its trials may go together
        return
    if needs.memory_bytes > limits.memory_bytes:
        say(
            f"a trial is predicted to take {needs.memory_bytes / 1e9:.1f} GB, more than the "
            f"{limits.memory_bytes / 1e9:.1f} GB for all of them: trials run one at a time"
        )
