"""Trials as jobs: what each engine is given, and what is known of them when it does not answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from argosy.config.launch import LaunchOptions
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.engines.engine import Job, NeverFits, ProgramJob, RunJob
from argosy.engines.local import Local
from argosy.engines.record import LAUNCH_FOLDER, JobState, LaunchedJob
from argosy.errors import UserError
from argosy.sweep.trials import Limits, Task, TrialNeeds, TrialRoom, Trials, gpus_here, metric_of, needs_of
from run_folder import RunFolder

LIMITS = Limits(trials=2, cores=4, memory_bytes=1e9, gpus=("0", "1", "2"))


class Kept(Local):
    """An engine that keeps the jobs that it is given, and says of them what a test says."""

    def __init__(self, queues: bool = False, most_waiting: int = 100):
        super().__init__()
        self.queues, self.most_waiting = queues, most_waiting  # type: ignore[misc]
        self.jobs: list[Job] = []
        self.says: JobState | UserError = "running"

    def start(self, job: Job) -> LaunchedJob:
        self.jobs.append(job)
        return LaunchedJob(engine="local", id=f"{len(self.jobs)}@1", submitted_s=0, nodes=1)

    def states(self, jobs: Sequence[LaunchedJob]) -> list[tuple[JobState, str]]:
        if isinstance(self.says, UserError):
            raise self.says
        return [(self.says, "")] * len(jobs)


def task(folder: Path, number: int, **needs: int) -> Task:
    run_dir = folder / f"{number:04d}"
    (run_dir / LAUNCH_FOLDER).mkdir(parents=True)
    return Task(number, RunConfig(), run_dir / "run.toml", run_dir, TrialNeeds(**{"cores": 1, **needs}))  # type: ignore[arg-type]


def trials(folder: Path, engine: Kept, limits: Limits = LIMITS) -> Trials:
    return Trials(folder, "mine", limits, LaunchOptions(time="1:00"), engine)


def test_a_trial_is_a_program_with_gpus_of_its_own(tmp_path: Path) -> None:
    engine = Kept()
    mine = trials(tmp_path, engine)
    mine.start([task(tmp_path, 0, gpus=2), task(tmp_path, 1, gpus=1)])
    first, second = engine.jobs
    assert isinstance(first, ProgramJob) and isinstance(second, ProgramJob)
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "0,1" and second.environment["CUDA_VISIBLE_DEVICES"] == "2"
    run_dir = tmp_path / "0000"
    assert first.python_words == ("-m", "argosy", "train", str(run_dir / "run.toml"), "--run-dir", str(run_dir))
    assert (first.cpus_per_node, first.time, first.log) == (1, "1:00", run_dir / LAUNCH_FOLDER / "local.out")
    assert first.name != second.name and first.name.startswith("mine-")


def test_where_runs_queue_a_trial_is_a_run_and_all_are_handed_over(tmp_path: Path) -> None:
    engine = Kept(queues=True)
    mine = trials(tmp_path, engine, Limits(trials=1, cores=0, memory_bytes=float("inf")))
    tasks = [task(tmp_path, number, cores=3) for number in range(3)]
    assert mine.engine.queues and all(mine.fits(one) for one in tasks)
    mine.start(tasks)
    assert all(isinstance(job, RunJob) and job.cpus_per_node == 3 for job in engine.jobs)
    assert not mine.is_full


def test_what_has_ended_makes_room(tmp_path: Path) -> None:
    engine = Kept()
    mine = trials(tmp_path, engine)
    jobs = mine.start([task(tmp_path, 0, cores=3), task(tmp_path, 1)])
    assert mine.is_full and not mine.fits(task(tmp_path, 2))
    engine.says = "ended"
    assert mine.states(jobs) == ["ended", "ended"]
    assert not mine.is_full and mine.fits(task(tmp_path, 3, cores=4))


def test_not_more_wait_than_the_engine_bears(tmp_path: Path) -> None:
    engine = Kept(most_waiting=1)
    mine = trials(tmp_path, engine)
    (job,) = mine.start([task(tmp_path, 0)])
    assert mine.is_full and not mine.fits(task(tmp_path, 1))
    assert mine.states([job]) == ["running"] and mine.fits(task(tmp_path, 2))


def test_an_engine_that_is_away_ends_no_trial_until_patience_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Kept()
    mine = trials(tmp_path, engine)
    jobs = mine.start([task(tmp_path, 0)])
    mine.states(jobs)
    engine.says = UserError("away")
    assert mine.states(jobs) == ["running"]
    monkeypatch.setattr("argosy.sweep.trials.ENGINE_PATIENCE_S", -1.0)
    with pytest.raises(UserError, match="away"):
        mine.states(jobs)


def test_a_trial_that_no_machine_can_hold_is_said_at_once(tmp_path: Path) -> None:
    engine = Kept()
    mine = trials(tmp_path, engine)
    jobs = mine.start([task(tmp_path, 0)])
    engine.says = NeverFits("it needs 2 CPUs")
    with pytest.raises(UserError, match="2 CPUs"):
        mine.states(jobs)


@pytest.mark.parametrize("on", ["kubernetes", "ssh"])
def test_engines_that_start_runs_only_are_refused(tmp_path: Path, on: str) -> None:
    with pytest.raises(UserError, match=f"--on {on}: trials are not supported there. Choose one of: local, ray, slurm"):
        Trials(tmp_path, "mine", LIMITS, LaunchOptions(on=on))  # type: ignore[arg-type]


SMALL = {"launch.device": "cpu", "plan": "dp_replicate=2,microbatch=1"}


def test_a_trial_that_does_not_fit_beside_others_runs_alone() -> None:
    room = TrialRoom(Limits(trials=0, cores=8, memory_bytes=10e9))
    assert room.fits(TrialNeeds(1, memory_bytes=20e9))
    room.take(0, TrialNeeds(1, memory_bytes=6e9))
    assert room.fits(TrialNeeds(1, memory_bytes=4e9)) and not room.fits(TrialNeeds(1, memory_bytes=5e9))
    room.take(1, TrialNeeds(7))
    assert room.is_full and not room.fits(TrialNeeds(1))
    room.give_back(0)
    assert room.fits(TrialNeeds(1, memory_bytes=5e9))


def test_trials_are_counted_and_have_gpus_of_their_own() -> None:
    room = TrialRoom(Limits(trials=2, cores=8, memory_bytes=1e9, gpus=("0", "1", "2")))
    assert not room.fits(TrialNeeds(1, gpus=4))
    assert room.take(0, TrialNeeds(1, gpus=2)) == ("0", "1")
    assert not room.fits(TrialNeeds(1, gpus=2)) and room.fits(TrialNeeds(1, gpus=1))
    assert room.take(1, TrialNeeds(1, gpus=1)) == ("2",)
    assert room.is_full
    room.give_back(0)
    room.take(5, TrialNeeds(1, gpus=1), gpus=("1",))  # as a sweep that was killed had dealt them
    assert room.take(6, TrialNeeds(1, gpus=1)) == ("0",)


@pytest.mark.parametrize(
    ("said", "gpus"),
    [("0\\n1\\n", ("0", "1")), ("No devices were found\\n", ()), ("0\\n[Unknown Error]\\n\\377\\n", ("0",))],
)
def test_only_numbers_that_nvidia_smi_lists_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, gpus: tuple[str, ...]
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{said}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_here() == gpus


def test_memory_is_that_of_the_planner_for_all_processes() -> None:
    limits = Limits(trials=2, cores=8, memory_bytes=1e9)
    small = needs_of(load("demo", SMALL), limits)
    large = needs_of(load("demo", {**SMALL, "model.preset": "llama-160m"}), limits)
    assert small.cores == 2 * 2 and small.gpus == 0
    assert (
        large.memory_bytes - small.memory_bytes > 2 * 16 * 100e6
    )  # two replicas of 100M parameters more, 16 bytes each
    assert needs_of(load("demo", {**SMALL, "launch.threads": 3}), limits).cores == 6
    assert needs_of(load("demo", SMALL | {"launch.device": "auto"}), Limits(0, 8, 1e9, ("0", "1"))) == TrialNeeds(
        2, gpus=2
    )


def test_a_metric_of_the_users_may_have_dots_in_its_name(tmp_path: Path) -> None:
    RunFolder(tmp_path).step(0, user={"val.acc": 0.5, "acc": 0.25})
    assert [metric_of(tmp_path, key, 0) for key in ("user.val.acc", "user.acc", "user.val")] == [0.5, 0.25, None]
