"""A sweep from its file to its result: propose trials, start them where there is room, collect what they have learned,
promote.

All that the loop knows is in the journal and in the trials' folders. So it may be killed at any moment and started
again: it finds the trials that still run, and starts the others again from their checkpoints.
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from argosy.compare.results import SWEEP_FILE
from argosy.config.dump import save_run
from argosy.config.launch import LaunchOptions
from argosy.config.load import RUN_FILE
from argosy.config.schema import RunConfig
from argosy.engines.record import LAUNCH_FOLDER, LaunchedJob
from argosy.engines.table import engine_for_programs
from argosy.errors import STOP_SIGNALS, Interrupted, RunFailed, UserError, signals_to
from argosy.extend.loading import approve
from argosy.launch.resolve import prepare_as_trained
from argosy.observe.screen import Progress
from argosy.processes.supervisor import RestartPolicy, Restarts
from argosy.sweep.load import Sweep, in_words, short
from argosy.sweep.result import Result
from argosy.sweep.rungs import Bracket, RungDecision, halving, hyperband, judge
from argosy.sweep.study import STUDY_JOURNAL, Study, Trial, check_is_same, check_optuna, enter, locked, trial_folder
from argosy.sweep.trials import (
    DIVERGED,
    TRIAL_OPTIONS,
    Limits,
    Task,
    Trials,
    has_reached,
    last_words,
    limits_on,
    metric_of,
    needs_of,
    outcome,
    processes,
    steps_of,
    threads,
)

REFUSED_REASON = "refused"
"""Begins the reason of a trial whose values do not go together."""
TRIAL_RESTARTS = RestartPolicy(most_failures=3)
"""The restarts of a trial; progress is a step more than before."""
MOST_ALIKE_FAILURES = 3
"""This many trials that fail in the same way, before any has learned anything, end the sweep."""
TPE_AT_ONCE = 8
"""Trials of tpe at a time in a place that queues them: what is proposed later knows more."""
TRIAL_SPARE_S = 30.0
Say = Callable[[str], None]


class Driver:
    """A sweep that runs."""

    def __init__(self, sweep: Sweep, folder: Path, study: Study, jobs: Trials, limits: Limits, say: Say):
        """folder: the sweep's, absolute and locked. say: shows a line to the user."""
        self._sweep, self._folder, self._study = sweep, folder, study
        self._trials, self._limits, self._say = jobs, limits, say
        self._brackets = brackets_of(sweep)
        self._minimize = sweep.config.direction == "minimize"
        self._jobs: dict[int, LaunchedJob] = {}
        self._tasks: dict[int, Task] = {}
        self._words: dict[int, str] = {}
        """Trial -> its values, for messages."""
        self._progress: dict[int, tuple[int, Restarts]] = {}
        """Trial -> its steps when it was last interrupted, and how often that was."""
        self._may_repeat = sweep.config.method in ("tpe", "random")
        self._stop = threading.Event()
        self._signal = 0

    @property
    def trials(self) -> int:
        return sum(bracket.counts[0] for bracket in self._brackets) or self._sweep.trials

    def run(self) -> None:
        """Return when all trials have ended.

        Raises: RunFailed if the trials fail alike; Interrupted after a signal, once those that run have saved;
        UserError if the place where trials run refuses.
        """
        with signals_to(self._end_by_signal, *STOP_SIGNALS):
            while not self._stop.is_set():
                self._collect()
                trials = self._judged()
                fail_alike = self._fail_alike(trials)
                if len(trials) == self.trials and all(trial.state != "open" for trial in trials):
                    return
                if not fail_alike:
                    self._start(trials)
                self._stop.wait(self._trials.engine.poll_s)
            self._save_and_end()

    def _collect(self) -> None:
        """Record what became of the trials whose jobs have ended."""
        numbers = list(self._jobs)
        states = self._trials.states([self._jobs[number] for number in numbers]) if numbers else []
        for number, state in zip(numbers, states, strict=True):
            if state == "ended":
                self._end(number, self._jobs.pop(number))

    def _end(self, number: int, job: LaunchedJob) -> None:
        task = self._tasks[number]
        found = outcome(task.run_dir, task.run.train.pause_at, self._trials.engine.exit_code(job), job.log)
        if found.kind == "reached":
            self._record(number, task.run)
        elif found.kind == "failed":
            self._fail(number, found.why)
        else:
            self._interrupted(number, found.why or last_words(job.log))

    def _interrupted(self, number: int, why: str) -> None:
        """Let a trial go on, unless it was started several times without a step."""
        done = steps_of(self._tasks[number].run_dir)
        before, restarts = self._progress.get(number, (0, Restarts(TRIAL_RESTARTS)))
        self._progress[number] = (done, restarts)
        if restarts.ended(made_progress=done > before) is None:
            self._fail(number, f"it ended {restarts.failures} times in a row without a step more than {done}: {why}")
        else:
            self._say(f"trial {number:04d} was interrupted at step {done}, and goes on ({why})")

    def _record(self, number: int, run: RunConfig) -> None:
        """Record the metric of a trial that has come to a rung, or to its end."""
        key, until = self._sweep.config.metric, run.train.pause_at
        value = metric_of(trial_folder(self._folder, number), key, until)
        if value is None:
            why = ": prepare the data with validation_fraction above 0" if key == "validation_loss" else ""
            self._fail(number, f"its metrics.jsonl has no {key}{why}")
        elif not math.isfinite(value):
            self._fail(number, f"{DIVERGED}: {key} is not finite" + (f" at step {until}" if until else " at the end"))
        elif until:
            self._study.report(number, until, value)
            self._say(f"trial {number:04d} at step {until}: {key} {short(value)}")
        else:
            self._study.complete(number, value)
            self._say(f"trial {number:04d} done: {key} {short(value)}")

    def _fail(self, number: int, why: str) -> None:
        self._study.fail(number, why)
        self._say(f"trial {number:04d} failed: {why}")

    def _judged(self) -> list[Trial]:
        """Stop trials that were not promoted; return all trials."""
        trials = self._study.trials()
        for bracket in self._brackets:
            for number in self._judgement(bracket, trials).stopped:
                if trials[number].state == "open":
                    self._study.stop(number)
                    self._say(f"trial {number:04d} stopped: others were better at step {max(trials[number].rungs)}")
        return self._study.trials()

    def _judgement(self, bracket: Bracket, trials: list[Trial]) -> RungDecision:
        mine = trials[bracket.trials.start : bracket.trials.stop]
        scores = {trial.number: trial.rungs for trial in mine}
        failed = {trial.number for trial in mine if trial.state == "failed"}
        return judge(bracket, scores, failed, self._minimize)

    def _targets(self, trials: list[Trial]) -> dict[int, int]:
        """Return trial -> steps until which it is to train now (0: its end), of those that do not wait at a rung."""
        if not self._brackets:
            return {trial.number: 0 for trial in trials if trial.state == "open"}
        found: dict[int, int] = {}
        for bracket in self._brackets:
            last = len(bracket.steps) - 1
            for number, rung in self._judgement(bracket, trials).train.items():
                if trials[number].state == "open":
                    found[number] = 0 if rung == last else bracket.steps[rung]
        return found

    def _start(self, trials: list[Trial]) -> None:
        """Start what is ready and fits; propose new trials as long as there is room for more."""
        ready: list[Task] = []
        waiting = False
        for number, until in self._targets(trials).items():
            if number not in self._jobs and (task := self._settle(trials[number], until)) is not None:
                waiting = not self._start_or_queue(task, ready) or waiting
        count = len(trials)
        while count < self.trials and not waiting and self._may_propose(len(ready)):
            trial = self._study.propose()
            count += 1
            until = self._targets(self._study.trials()).get(trial.number, 0)
            if (task := self._settle(trial, until)) is not None:
                waiting = not self._start_or_queue(task, ready)
        if ready:
            for task, job in zip(ready, self._trials.start(ready), strict=True):
                self._begin(task, job)

    def _may_propose(self, ready: int) -> bool:
        engine = self._trials.engine
        if not engine.queues:
            return not self._trials.is_full
        if self._sweep.config.method == "tpe":
            return len(self._jobs) + ready < (self._limits.trials or TPE_AT_ONCE)
        return not self._jobs and ready < engine.most_waiting  # only jobs of one start keep to a number at a time

    def _start_or_queue(self, task: Task, ready: list[Task]) -> bool:
        """Start a task if it fits, or gather it for a place that queues. Return False if it has to wait."""
        if self._trials.engine.queues:
            ready.append(task)
            return True
        if not self._trials.fits(task):
            return False
        self._begin(task, self._trials.start([task])[0])
        return True

    def _begin(self, task: Task, job: LaunchedJob, was_found: bool = False) -> None:
        """Take a job for a trial's. was_found: a sweep before has started it, and it never stopped."""
        job.save(task.run_dir)
        self._jobs[task.number] = job
        done = steps_of(task.run_dir)
        how = (f" goes on from step {done}" if done else "") if not was_found else f" never stopped, at step {done}"
        self._say(f"trial {task.number:04d}{how}: {self._words[task.number]}")

    def _settle(self, trial: Trial, until: int) -> Task | None:
        """Return the task of a trial that is to be started; None if it has its result without that, or trains already.

        A trial with the values of an earlier one waits for it, and takes its result.
        """
        known = self._tasks.get(trial.number)
        if known is not None and known.run.train.pause_at == until:
            return known
        if self._may_repeat and (twin := self._study.twin(trial)) is not None:
            if twin.state != "open":
                self._study.copy_result(trial.number, twin)
                self._say(f"trial {trial.number:04d} has the values, and the result, of trial {twin.number:04d}")
            return None
        try:
            task = self._task(trial, until)
        except UserError as error:
            self._fail(trial.number, f"{REFUSED_REASON}: {error}")
            return None
        self._tasks[trial.number] = task
        self._words[trial.number] = in_words(trial.values)
        if known is None and (job := self._trials.find(task)) is not None:
            self._begin(task, job, was_found=True)
            return None
        if has_reached(task.run_dir, until):
            self._record(trial.number, task.run)
            return None
        return task

    def _task(self, trial: Trial, until: int) -> Task:
        """Write the run file of a trial, and return its task. Raises: UserError if its values do not go together."""
        run_dir = trial_folder(self._folder, trial.number)
        run = self._sweep.run_of(trial.values)
        fixed: dict[str, object] = {"name": f"{self._sweep.config.name}-{trial.number:04d}", "train__pause_at": until}
        if not run.launch.processes:
            fixed["launch__processes"] = processes(run)
        if not run.launch.threads:
            fixed["launch__threads"] = threads(run, self._limits)
        if until and (not run.evaluate.every_steps or until % run.evaluate.every_steps):
            fixed["evaluate__every_steps"] = until
        if run.checkpoint.remote:  # trials of all sweeps have the same folders
            fixed["checkpoint__remote"] = f"{run.checkpoint.remote.rstrip('/')}/{self._sweep.config.name}"
        run = self._sweep.run_of(trial.values, **fixed)
        path = run_dir / LAUNCH_FOLDER / RUN_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        save_run(run, path)
        return Task(trial.number, run, path, run_dir, needs_of(run, self._limits))

    def _fail_alike(self, trials: list[Trial]) -> bool:
        """Return True if trials fail alike and none has learned anything: then no more are started.

        A trial that diverges, or whose values do not go together, says nothing about others.
        Raises: RunFailed once none of them runs any more.
        """
        failed = [trial for trial in trials if trial.state == "failed" and trial.same_as is None]
        reasons = {re.sub(r"[\d.]+", "#", trial.reason) for trial in failed}
        has_learned = any(trial.state in ("done", "stopped") or trial.rungs for trial in trials)
        if has_learned or len(reasons) != 1 or len(failed) < min(MOST_ALIKE_FAILURES, self.trials):
            return False
        if failed[0].reason.startswith((DIVERGED, REFUSED_REASON)):
            return False
        if not self._jobs:
            raise RunFailed(
                f"the first {len(failed)} trials failed alike: {failed[0].reason}\n  `argosy logs "
                f"{trial_folder(self._folder, failed[0].number)}` says more. Mend it, remove {self._folder}, and start "
                "again."
            )
        return True

    def _save_and_end(self) -> None:
        """Have the trials that run save and end. Raises: Interrupted."""
        jobs = list(self._jobs.values())
        if jobs:
            self._say(
                f"{signal.Signals(self._signal).name}: {len(jobs)} trials save their state; once more leaves them"
            )
            self._stop.clear()
            self._trials.engine.stop_all(jobs)
            self._wait_for(jobs)
        raise Interrupted(
            f"the sweep was stopped by {signal.Signals(self._signal).name}. The same command goes on ({self._folder}).",
            self._signal,
        )

    def _wait_for(self, jobs: list[LaunchedJob]) -> None:
        """Wait until these jobs have ended, not longer than they may take to save, nor beyond a signal."""
        end = time.monotonic() + self._sweep.base.resilience.grace_s + TRIAL_SPARE_S
        while jobs and time.monotonic() < end and not self._stop.is_set():
            states = self._trials.states(jobs)
            jobs = [job for job, state in zip(jobs, states, strict=True) if state != "ended"]
            if jobs:
                self._stop.wait(min(1.0, self._trials.engine.poll_s))

    def _end_by_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._stop.set()


def brackets_of(sweep: Sweep) -> list[Bracket]:
    """Return the brackets of a sweep by successive halving; none for other methods."""
    config, steps = sweep.config, sweep.base.train.steps
    if config.method == "halving":
        return halving(sweep.trials, steps, config.halving.eta, config.halving.min_steps)
    if config.method == "hyperband":
        return hyperband(steps, config.halving.eta, config.halving.min_steps)
    return []


def run_sweep(sweep: Sweep, folder: Path, options: LaunchOptions) -> Result:
    """Run a sweep, or go on with it, in its folder; return what it has found.

    Raises: UserError if it cannot be started as asked; RunFailed if its trials fail alike; Interrupted after SIGINT or
    SIGTERM, once its trials have saved.
    """
    check_optuna()
    _check_data(sweep)
    approve(sweep.base.extend.code)
    limits = limits_on(options.on, sweep.config)
    progress = Progress(enabled=True)
    trials = Trials(folder, sweep.config.name, limits, options)
    with locked(folder):
        enter(folder, sweep)
        study = Study(folder, sweep)
        _prepare_data(sweep, progress)
        driver = Driver(sweep, folder, study, trials, limits, progress.say)
        progress.say(f"sweep {sweep.config.name}: {driver.trials} trials in {folder}")
        if options.on == "local":
            _say_what_does_not_fit(sweep, limits, progress.say)
        try:
            driver.run()
        finally:
            result = Result.of(sweep, folder, study)
            result.write()
    return result


def would_sweep(sweep: Sweep, folder: Path, options: LaunchOptions) -> list[str]:
    """Return what `run_sweep` would do, in words that go on from "would". Raises: UserError, as it before it begins."""
    check_optuna()
    _check_data(sweep)
    limits, config = limits_on(options.on, sweep.config), sweep.config
    engine_for_programs("trials", options, TRIAL_OPTIONS)
    count = sum(bracket.counts[0] for bracket in brackets_of(sweep)) or sweep.trials
    what = f"train {count} trials of {sweep.base.name} by {config.method}, to {config.direction} {config.metric}"
    if (folder / STUDY_JOURNAL).exists():
        result = show_sweep(sweep, folder)
        ended = sum(trial.state in ("done", "stopped", "failed") for trial in result.trials)
        what = f"go on with the sweep in {folder}: {ended} of {count} trials have ended"
    at_once = f"at most {limits.trials} at a time" if limits.trials else "as many at a time as there is room for"
    return [what, f"run them on {options.on}, {at_once}, each in a folder of its own in {folder}"]


def show_sweep(sweep: Sweep, folder: Path) -> Result:
    """Return what a sweep has found so far, whether it runs or not. Raises: UserError if its folder is not there."""
    check_optuna()
    if not (folder / SWEEP_FILE).exists() or not (folder / STUDY_JOURNAL).exists():
        raise UserError(f"{folder}: there is no sweep yet. Start it without --show.")
    check_is_same(folder, sweep)
    return Result.of(sweep, folder, Study(folder, sweep, may_write=False))


def _check_data(sweep: Sweep) -> None:
    """Raise UserError if trials have no data to train on."""
    data = sweep.base.data
    if not data.prepare.input and not data.sources and not any(p.key.startswith("data") for p in sweep.parameters):
        raise UserError(
            f"{sweep.path}: its run has no data to train on. Give data.sources (folders that `argosy prepare` wrote), "
            "or data.prepare.input (text to prepare)."
        )


def _prepare_data(sweep: Sweep, progress: Progress) -> None:
    """Prepare the data that all trials read, once."""
    if sweep.base.data.prepare.input:
        prepare_as_trained(sweep.base, progress)
        progress.close()


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
