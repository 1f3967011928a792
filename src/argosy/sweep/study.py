"""The folder of a sweep, and the journal in it: Optuna's, which proposes values and keeps what became of each trial.

Only the process that holds the folder's lock writes to it. A trial is counted by its number in the journal: one that is
there is never proposed again, whatever was killed since.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from argosy.compare.results import SWEEP_FILE
from argosy.config.dump import dump, save_run
from argosy.config.schema import RunConfig
from argosy.config.section import dotted, flatten
from argosy.errors import UserError, imported
from argosy.files import atomic_write, lock_or_holder, made_folder
from argosy.launch.run_folder import refuse_others
from argosy.sweep.load import Scalar, Sweep, SweepParameter, Values, drawn, load_sweep

STUDY_JOURNAL = "journal.log"
STUDY_LOCK, BASE = ".lock", "base.toml"
STUDY_FILES = (STUDY_LOCK, SWEEP_FILE, BASE, STUDY_JOURNAL)
SWEEP_MAY_CHANGE = ("parallel", "run")


def trial_folder(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the sweep's folder, which is made, for this process; the kernel releases the lock when the process dies.

    Raises: UserError if another process holds it, or the folder is not a sweep's.
    """
    check_is_sweep_folder(folder)
    try:
        with made_folder(folder) as made, (folder / STUDY_LOCK).open("a+") as file:
            if (holder := lock_or_holder(file)) is not None:
                made.is_kept = True
                raise UserError(
                    f"{folder} is in use by process {holder}: the sweep runs already. Wait for it, follow it with "
                    "--show, or give this sweep another folder with --sweep-dir."
                )
            yield
    except OSError as problem:
        raise UserError(
            f"{folder}: cannot be written ({problem.strerror}). Choose another folder with --sweep-dir."
        ) from None


def check_is_sweep_folder(folder: Path) -> None:
    """Raise UserError if `folder` is there, and is neither empty nor the folder of a sweep."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and a sweep needs a folder. Choose another with --sweep-dir.")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if SWEEP_FILE not in names:
        refuse_others(folder, sorted(names - set(STUDY_FILES)), "sweep")


def enter(folder: Path, sweep: Sweep) -> None:
    """Write the sweep to its folder, or check that it is the one that is there.

    Only [parallel] may change, and the number of trials grow where trials do not compete at rungs.
    Raises: UserError, which names what differs.
    """
    if (folder / SWEEP_FILE).exists():
        check_is_same(folder, sweep)
    save_run(sweep.base, folder / BASE)
    config = sweep.config.model_copy(update={"run": BASE})
    with atomic_write(folder / SWEEP_FILE) as file:
        file.write(dump(config).encode())


def check_is_same(folder: Path, sweep: Sweep) -> None:
    """Raise UserError if the folder holds another sweep than this one."""
    before = load_sweep(folder / SWEEP_FILE)
    old, new = _values(before), _values(sweep)
    changed = [key for key in old | new if old.get(key) != new.get(key)]
    if sweep.config.method in ("random", "tpe", "grid") and before.trials <= sweep.trials and "trials" in changed:
        changed.remove("trials")
    if changed:
        lines = [f"  {key}: {_shown(old.get(key))} in the folder, {_shown(new.get(key))} now" for key in changed]
        raise UserError(
            f"{folder} holds another sweep:\n" + "\n".join(lines) + "\n  Give this one a folder of its own: "
            "another name in the file, or --sweep-dir."
        )


def _values(sweep: Sweep) -> dict[str, Any]:
    """Return dotted key -> value of all that must not change between two starts."""
    config = sweep.config.model_dump(mode="json")
    values = {key: value for key, value in config.items() if key not in (*SWEEP_MAY_CHANGE, "parameters")}
    values |= {f"parameters.{key}": range_ for key, range_ in config["parameters"].items()}
    run = flatten(sweep.base.model_dump(mode="json"), RunConfig)
    return values | {f"run: {dotted(key)}": value for key, value in run.items()}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return str({key: inner for key, inner in value.items() if inner not in (None, False)})
    return str(value)


REASON = "reason"
TWIN = "same_as"
STARTUP_TRIALS = 10
"""Trials of tpe that are drawn at random, or a quarter of all: a model of fewer knows nothing."""
State = Literal["open", "done", "stopped", "failed"]


@dataclass(frozen=True)
class Trial:
    """A trial, as the journal has it."""

    number: int
    values: Values
    state: State
    """open: it trains, is to train, or waits at a rung; stopped: it was not promoted."""
    metric: float | None = None
    """The metric at its last rung, or at its end."""
    rungs: Mapping[int, float] = field(default_factory=dict)
    """Steps -> metric, where it was judged."""
    reason: str = ""
    """Why it failed."""
    same_as: int | None = None
    """The trial with the same values, whose result it has."""


class Study:
    """The journal, open."""

    def __init__(self, folder: Path, sweep: Sweep, may_write: bool = True):
        """Open the journal in `folder`. may_write: False reads only, and needs one that is there.

        Raises: UserError without Optuna, or if the journal cannot be read.
        """
        self._optuna = _optuna()
        self._sweep = sweep
        path = folder / STUDY_JOURNAL
        if may_write:
            _mend(path)
        backend = self._optuna.storages.journal.JournalFileBackend(str(path), lock_obj=_NoLock())
        options = {"study_name": sweep.config.name, "sampler": self._optuna.samplers.RandomSampler()}
        try:
            storage = self._optuna.storages.JournalStorage(backend)
            if may_write:
                options |= {"direction": sweep.config.direction, "load_if_exists": True}
                self._study = self._optuna.create_study(storage=storage, **options)
            else:
                self._study = self._optuna.load_study(storage=storage, **options)
        except (ValueError, KeyError) as problem:
            raise UserError(
                f"{path}: is no journal of this sweep ({problem}). Restore it, or begin again in another --sweep-dir."
            ) from None

    def trials(self) -> list[Trial]:
        return [self._trial(found) for found in self._study.get_trials(deepcopy=False) if self._is_whole(found)]

    def propose(self) -> Trial:
        """Return a new trial, or one that a kill left without all of its values."""
        found = self._study.get_trials(deepcopy=False)
        number = len(found) - 1 if found and not self._is_whole(found[-1]) else len(found)
        if self._sweep.config.method == "grid" and number == len(found):
            values = self._sweep.grid[number]
            self._study.enqueue_trial({p.key: drawn(p, values[p.key]) for p in self._sweep.parameters})
            found = self._study.get_trials(deepcopy=False)
        unfinished = found[number] if number < len(found) else None
        if unfinished is None or unfinished.state == self._optuna.trial.TrialState.WAITING:
            trial = self._study.ask()
        else:
            trial = self._optuna.trial.Trial(self._study, unfinished._trial_id)
        for place, parameter in enumerate(self._sweep.parameters):
            self._study.sampler = self._sampler(number, place)
            _suggest(trial, parameter)
        self._study.sampler = self._optuna.samplers.RandomSampler()  # one that does nothing when a trial ends
        return self._trial(self._study.get_trials(deepcopy=False)[number])

    def twin(self, trial: Trial) -> Trial | None:
        """Return an earlier trial with the same values; None if there is none."""
        others = self.trials()[: trial.number]
        return next((t for t in others if t.same_as is None and t.values == trial.values), None)

    def report(self, number: int, steps: int, metric: float) -> None:
        self._handle(number).report(metric, steps)

    def complete(self, number: int, metric: float) -> None:
        self._study.tell(number, metric)

    def copy_result(self, number: int, of: Trial) -> None:
        """Record that a trial has the values, and so the result, of another one that has ended."""
        self._handle(number).set_user_attr(TWIN, of.number)
        if of.state == "done" and of.metric is not None:
            self.complete(number, of.metric)
        else:
            self.fail(number, of.reason)

    def stop(self, number: int) -> None:
        self._study.tell(number, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        self._handle(number).set_user_attr(REASON, reason)
        self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)

    def importance(self) -> dict[str, float]:
        """Return each parameter's share of what decides whether a trial is good (PED-ANOVA, Watanabe et al. 2023).

        Empty if the trials that came to their end are too few, or the metric hardly differs.
        """
        done = [trial for trial in self.trials() if trial.state == "done"]
        if len(self._sweep.parameters) < 2 or len(done) < 2 * len(self._sweep.parameters) + 2:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importance = self._optuna.importance  # before Optuna 5 the default is another, which needs scikit-learn
            try:
                shares = importance.get_param_importances(
                    self._study, evaluator=importance.PedAnovaImportanceEvaluator()
                )
            except (ValueError, RuntimeError):
                return {}
        return {key: float(share) for key, share in shares.items() if np.isfinite(share)}

    def _handle(self, number: int) -> Any:
        found = self._study.get_trials(deepcopy=False)[number]
        return self._optuna.trial.Trial(self._study, found._trial_id)

    def _is_whole(self, found: Any) -> bool:
        """False if a kill came between the parts of a proposal."""
        is_waiting = found.state == self._optuna.trial.TrialState.WAITING
        return not is_waiting and all(p.key in found.params for p in self._sweep.parameters)

    def _trial(self, found: Any) -> Trial:
        states = self._optuna.trial.TrialState
        names: dict[Any, State] = {states.COMPLETE: "done", states.PRUNED: "stopped", states.FAIL: "failed"}
        rungs = {int(step): float(value) for step, value in sorted(found.intermediate_values.items())}
        return Trial(
            number=found.number,
            values={p.key: p.value(found.params[p.key]) for p in self._sweep.parameters},
            state=names.get(found.state, "open"),
            metric=found.value if found.value is not None else next(reversed(rungs.values()), None),
            rungs=rungs,
            reason=str(found.user_attrs.get(REASON, "")),
            same_as=found.user_attrs.get(TWIN),
        )

    def _sampler(self, number: int, place: int) -> Any:
        """Return the sampler of one value: seeded by its trial and its place, so that a killed sweep draws the same."""
        seed = int(np.random.SeedSequence([self._sweep.config.seed, number, place]).generate_state(1)[0])
        samplers = self._optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # BruteForceSampler and constant_liar are called experimental
            if self._sweep.config.method == "tpe":
                startup = min(STARTUP_TRIALS, max(3, self._sweep.trials // 4))
                return samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
            if all(parameter.is_list for parameter in self._sweep.parameters) and self._sweep.config.method != "grid":
                return samplers.BruteForceSampler(seed=seed)  # random, but none twice as long as there are others
            return samplers.RandomSampler(seed=seed)


def _suggest(trial: Any, parameter: SweepParameter) -> Scalar:
    key = parameter.key
    if parameter.is_list:
        return trial.suggest_categorical(key, parameter.choices)
    if parameter.whole:
        low, step = int(parameter.low), int(parameter.step or 1)
        highest = low + (int(parameter.high) - low) // step * step
        return trial.suggest_int(key, low, highest, log=parameter.log, step=step)
    return trial.suggest_float(key, parameter.low, parameter.last, log=parameter.log, step=parameter.step)


def check_optuna() -> None:
    """Raise UserError if Optuna is not installed."""
    _optuna()


def _optuna() -> Any:
    optuna, _ = (imported(module, "sweep", "argosy sweep") for module in ("optuna", "optuna.importance"))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class _NoLock:
    """A lock that locks nothing: the sweep's folder has one, which the kernel takes back after a kill."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _mend(path: Path) -> None:
    """Cut a last line off that is not whole, as a full disk leaves it: the next line would be lost with it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
