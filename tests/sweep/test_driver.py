"""The driver of a sweep: what it says of trials that it takes up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from argosy.launch.engines.job import FOLDER, JobState, LaunchedJob
from argosy.sweep.driver import Driver
from argosy.sweep.executor import Task, TrialExecutor
from argosy.sweep.load import load_sweep
from argosy.sweep.needs import Limits
from argosy.sweep.study import Study


class Said(Exception):
    """The first line that a driver says."""


class Left(TrialExecutor):
    """A place in which a sweep before has left each trial running, or ended."""

    name = "slurm"

    def __init__(self, state: JobState):
        self._state = state

    def start(self, tasks: Sequence[Task]) -> list[LaunchedJob]:
        return [LaunchedJob(engine=self.name, id="8", submitted_s=0, nodes=1) for _ in tasks]

    def states(self, jobs: Sequence[LaunchedJob]) -> list[JobState]:
        return [self._state for _ in jobs]

    def stop(self, jobs: Sequence[LaunchedJob]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("state", "steps", "said"),
    [
        ("running", 3, "trial 0000 never stopped, at step 3: "),
        ("unknown", 3, "trial 0000 never stopped, at step 3: "),
        ("ended", 3, "trial 0000 goes on from step 3: "),
        ("ended", 0, "trial 0000: "),
    ],
)
def test_a_trial_that_never_stopped_does_not_go_on(tmp_path: Path, state: JobState, steps: int, said: str) -> None:
    (tmp_path / "s.toml").write_text("method = 'grid'\n[parameters]\nseed = [1]\n[run.train]\nsteps = 90\n")
    sweep = load_sweep(tmp_path / "s.toml")
    run_dir = tmp_path / "0000"
    (run_dir / FOLDER).mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(steps)))
    LaunchedJob(engine="slurm", id="7", submitted_s=0, nodes=1).save(run_dir)

    def say(text: str) -> None:
        raise Said(text)

    limits = Limits(trials=1, cores=sys.maxsize, memory_bytes=float("inf"))
    with pytest.raises(Said, match=rf"^{said}seed=1"):
        Driver(sweep, tmp_path, Study(tmp_path, sweep), Left(state), limits, say).run()
