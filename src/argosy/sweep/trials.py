"""The trials of a sweep: what each needs, the limits of all together, and their jobs on any engine.

On an engine that queues runs and starts them again, a trial is a run like any other. Elsewhere it is one process that
trains it: if that ends too early, the sweep starts the trial once more. Each job is kept in its trial's folder, so that
a sweep that was killed finds its trials again, and `argosy runs`, `logs` and `stop` take them for what they are: runs
that were launched.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from argosy.checkpoint.store import saved_step
from argosy.config.launch import ClusterOptions, LaunchOptions
from argosy.config.schema import RunConfig
from argosy.engines.engine import Engine, Job, NeverFits, ProgramJob, RunJob
from argosy.engines.record import LAUNCH_FOLDER, JobState, LaunchedJob
from argosy.engines.table import ENGINES, engine_for_programs
from argosy.errors import Retryable, RunFailed, UserError
from argosy.files import text_at_end
from argosy.launch.resolve import with_known_sizes
from argosy.observe.events import from_the_end
from argosy.plan.cost.prediction import predict
from argosy.plan.hardware.local_machine import DetectedHardware, cores_here, host_memory_bytes, machine_at_hand
from argosy.plan.search.auto import Devices, choose_plan, processes_of
from argosy.sweep.config import Parallel, SweepConfig
from argosy.watch.metrics_table import OF_EVALUATIONS
from argosy.watch.reader import RunReader, is_run

BESIDE_BYTES, WORKER_BYTES = 300e6, 250e6
"""Memory of a run beside its model: of its agent, coordinator, fork server and writer together, and of each worker
(proportional set sizes on the 2-core CPU machine of the benchmarks, and benchmarks/results/planner_memory_cpu.md)."""
SHARE_OF_MEMORY = 0.9
ANY_RATE = {"fp32": 1e11, "bf16": 1e11}
"""Memory does not depend on it."""


@dataclass(frozen=True)
class TrialNeeds:
    """The part of a machine that one trial takes."""

    cores: int
    gpus: int = 0
    memory_bytes: float = 0.0
    """Host memory of all its processes, as predicted; 0 if its model is on GPUs."""


@dataclass(frozen=True)
class Limits:
    """The most that trials that run at the same time may take together."""

    trials: int
    """0: no limit of its own."""
    cores: int
    memory_bytes: float
    gpus: tuple[str, ...] = ()
    """Their names for CUDA_VISIBLE_DEVICES."""


def limits_of(parallel: Parallel) -> Limits:
    """Return the limits that the sweep file sets; what it leaves out is this machine's."""
    there = gpus_here()
    return Limits(
        trials=parallel.trials,
        cores=parallel.cores or cores_here(),
        memory_bytes=parallel.memory_gb * 1e9 or SHARE_OF_MEMORY * host_memory_bytes(),
        gpus=there if parallel.gpus is None else there[: parallel.gpus],
    )


def gpus_here() -> tuple[str, ...]:
    """Return the GPUs that this process may use; none if nvidia-smi is not there, or lists none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, errors="replace", timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line for line in map(str.strip, listed.stdout.splitlines()) if line.isdecimal())


def processes(run: RunConfig) -> int:
    """Return the worker processes of a trial: as the plan or launch.processes says, else one. Raises: UserError."""
    return processes_of(run.plan) or run.launch.processes or 1


def threads(run: RunConfig, limits: Limits) -> int:
    """Return the CPU threads of each worker, so that all trials together have the cores."""
    return run.launch.threads or max(1, limits.cores // max(1, limits.trials) // processes(run) if limits.trials else 1)


def needs_of(run: RunConfig, limits: Limits) -> TrialNeeds:
    """Return what a trial takes. Its memory is the planner's prediction, at the upper end of the interval.

    Raises: UserError if no plan can train it.
    """
    count = processes(run)
    cores = count * threads(run, limits)
    if limits.gpus and run.launch.device != "cpu":
        return TrialNeeds(cores, gpus=count)
    return TrialNeeds(cores, memory_bytes=memory_bytes(run, count))


def memory_bytes(run: RunConfig, count: int) -> float:
    """Return the memory that `count` worker processes on CPUs are predicted to take, with all beside them."""
    devices = Devices(count, "cpu", fast_bf16=False, memory_bytes=host_memory_bytes() / count, per_node=count)
    run = with_known_sizes(run)
    cluster = machine_at_hand(run, DetectedHardware("cpu", count, count, ANY_RATE))
    assert cluster is not None  # the catalogue has CPUs
    predicted = predict(choose_plan(run, devices), run, cluster)
    return BESIDE_BYTES + count * (WORKER_BYTES + float(predicted.memory_bytes.high))


class TrialRoom:
    """The rest of the limits while trials run."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._taken: dict[int, tuple[TrialNeeds, tuple[str, ...]]] = {}

    @property
    def is_full(self) -> bool:
        """True if nothing fits, however small."""
        limits, cores = self._limits, sum(taken.cores for taken, _ in self._taken.values())
        return bool(self._taken) and (0 < limits.trials <= len(self._taken) or cores >= limits.cores)

    def fits(self, needs: TrialNeeds) -> bool:
        """Return True if a trial fits beside those that run; one that is alone always fits, if it has its GPUs."""
        limits = self._limits
        if needs.gpus > len(self._free_gpus):
            return False
        if not self._taken:
            return True
        others = [taken for taken, _ in self._taken.values()]
        return (
            (not limits.trials or len(others) < limits.trials)
            and needs.cores + sum(other.cores for other in others) <= limits.cores
            and needs.memory_bytes + sum(other.memory_bytes for other in others) <= limits.memory_bytes
        )

    def take(self, number: int, needs: TrialNeeds, gpus: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Count a trial as running. Return its GPUs: those that it has already, or some that are free."""
        given = self._free_gpus[: needs.gpus] if gpus is None else gpus
        self._taken[number] = (needs, given)
        return given

    def give_back(self, number: int) -> None:
        self._taken.pop(number, None)

    @property
    def _free_gpus(self) -> tuple[str, ...]:
        taken = {gpu for _, gpus in self._taken.values() for gpu in gpus}
        return tuple(gpu for gpu in self._limits.gpus if gpu not in taken)


GPUS = "gpus"
"""File in a trial's folder for launches: the GPUs that its processes were given."""
ENGINE_PATIENCE_S = 600.0
"""An engine that does not answer for so long ends the sweep; its trials go on."""
TRIAL_OPTIONS = {"gpus_per_node": "--gpus-per-trial"} | {
    field.name: f"--{field.name}" for field in fields(ClusterOptions)
}
"""Field of a trial's job -> its option."""


@dataclass(frozen=True)
class Task:
    """A trial that is to be trained from its newest checkpoint on, or from the start if it has none.

    It trains until its run file says, its end or `train.pause_at`; then its command ends with exit code 0.
    """

    number: int
    """The trial's number in the sweep, from 0."""
    run: RunConfig
    run_file: Path
    """Absolute, as `run_dir`."""
    run_dir: Path
    """It exists, and so does its folder `launch`, for what the task prints."""
    needs: TrialNeeds


def limits_on(on: str, config: SweepConfig) -> Limits:
    """Return what trials that run at the same time may take together.

    On an engine that queues them only their number counts, on another cluster what the sweep file says.
    """
    parallel = config.parallel
    if on == "local":
        return limits_of(parallel)
    if ENGINES[on].queues:
        return Limits(parallel.trials, cores=0, memory_bytes=float("inf"))
    return Limits(parallel.trials, parallel.cores, parallel.memory_gb * 1e9 or float("inf"))


class Trials:
    """The jobs of a sweep that wait or run, on one engine."""

    def __init__(self, folder: Path, name: str, limits: Limits, options: LaunchOptions, engine: Engine | None = None):
        """folder, name: the sweep's. options: what each trial asks of its engine. engine: that of `options.on`.

        Raises: UserError if the engine starts no trials, is not there, or an option has no meaning there.
        """
        self.engine = engine or engine_for_programs("trials", options, TRIAL_OPTIONS)
        """One that queues trials is handed all that are ready at once: it lets them wait until there is room."""
        self._room = TrialRoom(replace(limits, cores=limits.cores or sys.maxsize))
        self._limits, self._options = limits, options
        self._name = f"{name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        self._states: dict[str, JobState] = {}
        """Job -> its state when it was last known, of those that have not ended."""
        self._numbers: dict[str, int] = {}
        self._answered_s = time.monotonic()

    def fits(self, task: Task) -> bool:
        """Return True if there is room for the trial beside those that run, and not too many wait for the engine's."""
        return self.engine.queues or (not self._many_wait and self._room.fits(task.needs))

    @property
    def is_full(self) -> bool:
        """True if no trial would fit, whatever it needs."""
        return not self.engine.queues and (self._many_wait or self._room.is_full)

    @property
    def _many_wait(self) -> bool:
        return sum(state == "waiting" for state in self._states.values()) >= self.engine.most_waiting

    def start(self, tasks: Sequence[Task]) -> list[LaunchedJob]:
        """Start each task, or put it into the engine's queue; return their jobs, in the same order."""
        jobs = [self._job(task, self._room.take(task.number, task.needs)) for task in tasks]
        started = self.engine.start_all(jobs, self._limits.trials)
        for task, job in zip(tasks, started, strict=True):
            self._numbers[job.id], self._states[job.id] = task.number, "waiting"
        return started

    def find(self, task: Task) -> LaunchedJob | None:
        """Return the job with this trial that a sweep that was killed has left, if it goes on."""
        if (job := self.engine.find(self._job(task, ()))) is None:
            return None
        gpus = task.run_dir / LAUNCH_FOLDER / GPUS
        self._room.take(task.number, task.needs, tuple(gpus.read_text().split()) if gpus.exists() else ())
        self._numbers[job.id], self._states[job.id] = task.number, "running"
        return job

    def states(self, jobs: Sequence[LaunchedJob]) -> list[JobState]:
        """Return what the engine says of them. If it does not answer for a while, they are as they were."""
        try:
            found = [state for state, _ in self.engine.states(jobs)]
            self._answered_s = time.monotonic()
        except NeverFits:
            raise
        except UserError:
            if time.monotonic() - self._answered_s > ENGINE_PATIENCE_S:
                raise
            return [self._states.get(job.id, "running") for job in jobs]
        for job, state in zip(jobs, found, strict=True):
            self._states[job.id] = state
            if state == "ended":
                del self._states[job.id]
                self._room.give_back(self._numbers.pop(job.id, -1))
        return found

    def _job(self, task: Task, gpus: Sequence[str]) -> Job:
        """Return the job of a task. gpus: those of this machine that it is given."""
        asked = {**self._options.for_engine(), "cpus_per_node": task.needs.cores}
        words = (str(task.run_file),)
        if self.engine.queues:
            return RunJob(run=task.run, run_dir=task.run_dir, words=words, work_dir=Path.cwd(), **asked)
        folder = task.run_dir / LAUNCH_FOLDER
        environment = {}
        if gpus:
            (folder / GPUS).write_text(" ".join(gpus))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return ProgramJob(
            title=f"{self._name}-{task.number:04d}",
            module="argosy",
            words=("train", *words, "--run-dir", str(task.run_dir)),
            log=folder / f"{self.engine.name}.out",
            work_dir=Path.cwd(),
            environment=environment,
            memory_bytes=task.needs.memory_bytes,
            save_s=task.run.resilience.grace_s,
            **asked,
        )


SHARE_OF_STEPS = 0.1
"""The metric of steps is the mean over so many of the last ones."""
DIVERGED = "diverged"
"""Begins the reason of a trial whose numbers are no longer finite."""
TRIAL_LOG_BYTES = 4096


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial that does not run any more."""

    kind: Literal["reached", "again", "failed"]
    """reached: it has come to the rung, or its end; again: it was interrupted and goes on from its checkpoint."""
    why: str = ""


def outcome(run_dir: Path, until: int, code: int | None, log: str) -> TrialOutcome:
    """Return what became of a trial whose job has ended.

    until: the step at which it was to pause; 0: at its end. code: exit code of its command, None if nobody knows.
    log: the file that it printed to.
    """
    if has_reached(run_dir, until):
        return TrialOutcome("reached")
    if code == UserError.exit_code or (code == RunFailed.exit_code and not is_run(run_dir)):
        return TrialOutcome("failed", last_words(log) or f"it ended with exit code {code}")
    if not is_run(run_dir):
        return TrialOutcome("again", last_words(log))
    reader = RunReader.read(run_dir)
    codes = [event["exit_code"] for event in reader.events if event["event"] == "finish"]
    if reader.state == "failed" and codes[-1:] != [Retryable.exit_code]:
        bad = next((event for event in reversed(reader.events) if event["event"] == "bad_step"), {})
        if bad.get("outcome") == "stop":
            return TrialOutcome("failed", f"{DIVERGED} at step {bad.get('step')}: {bad.get('reason')}")
        return TrialOutcome("failed", reader.why)
    return TrialOutcome("again", "" if reader.state == "training" else reader.why)


def has_reached(run_dir: Path, until: int) -> bool:
    """Return True if the trial is finished, or has paused with its state saved at step `until`."""
    if not is_run(run_dir):
        return False
    if until:
        return saved_step(run_dir) >= until
    return RunReader.read(run_dir).state == "finished"


def last_words(log: str) -> str:
    """Return the last message of a command that ended: what stands behind the last `argosy:` of its log."""
    try:
        text = text_at_end(Path(log), TRIAL_LOG_BYTES).strip()
    except OSError:
        return ""
    message = re.split(r"(?m)^argosy: ", text)[-1].strip() if "argosy: " in text else text.rpartition("\n")[2]
    return message.partition("\n")[0] if len(message) > 300 else " ".join(message.split())


def metric_of(run_dir: Path, key: str, until: int) -> float | None:
    """Return a metric of metrics.jsonl after `until` steps (0: at the end); None if it is not there.

    Of an evaluation the last one counts, of steps the mean over the last tenth. NaN stands for what was no number.
    """
    values: list[float] = []
    last = 0
    for record in from_the_end(run_dir / "metrics.jsonl"):
        step = int(record["step"]) + 1
        if (until and step > until) or _inner(record, key) is _MISSING:
            continue
        last = last or step
        if key.partition(".")[0] in OF_EVALUATIONS:
            return _number(record, key) if not until or step == until else None
        if step <= last * (1 - SHARE_OF_STEPS) and values:
            break
        values.append(_number(record, key))
    return math.fsum(values) / len(values) if values else None


def steps_of(run_dir: Path) -> int:
    return next((int(record["step"]) + 1 for record in from_the_end(run_dir / "metrics.jsonl")), 0)


def _number(record: dict[str, Any], key: str) -> float:
    value = _inner(record, key)
    return float(value) if isinstance(value, int | float) else math.nan


def _inner(value: Any, key: str) -> Any:
    """Return the value of a key in nested tables, whose names may have dots themselves."""
    if not isinstance(value, dict) or key in value:
        return value[key] if isinstance(value, dict) else _MISSING
    tables = (name for name in value if key.startswith(f"{name}."))
    found = (_inner(value[name], key.removeprefix(f"{name}.")) for name in tables)
    return next((each for each in found if each is not _MISSING), _MISSING)


_MISSING = object()
