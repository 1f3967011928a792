"""The driver of a sweep: what it says of trials that it takes up."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.config.launch import LaunchOptions
from argosy.config.load import load
from argosy.data.manifest import Manifest
from argosy.engines.engine import Engine, Job
from argosy.engines.local import Local
from argosy.engines.record import LAUNCH_FOLDER, JobState, LaunchedJob
from argosy.errors import UserError
from argosy.sweep.driver import Driver, run_sweep, would_sweep
from argosy.sweep.load import load_sweep
from argosy.sweep.study import Study
from argosy.sweep.trials import DIVERGED, Limits, TrialOutcome, Trials
from tiny import run_config


class Said(Exception):
    """The first line that a driver says."""


class Left(Local):
    """An engine on which a sweep before has left each trial running, or ended."""

    name = "slurm"
    queues = True

    def __init__(self, state: JobState):
        super().__init__()
        self._state = state

    def start(self, job: Job) -> LaunchedJob:
        return LaunchedJob(engine=self.name, id="8@1", submitted_s=0, nodes=1)

    def find(self, job: Job) -> LaunchedJob | None:
        return Engine.find(self, job)

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        return self._state, ""


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
    (run_dir / LAUNCH_FOLDER).mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(steps)))
    LaunchedJob(engine="slurm", id="7@1", submitted_s=0, nodes=1).save(run_dir)

    def say(text: str) -> None:
        raise Said(text)

    limits = Limits(trials=1, cores=sys.maxsize, memory_bytes=float("inf"))
    with pytest.raises(Said, match=rf"^{said}seed=1"):
        trials = Trials(tmp_path, "s", limits, LaunchOptions(on="slurm"), Left(state))
        Driver(sweep, tmp_path, Study(tmp_path, sweep), trials, limits, say).run()


def test_an_array_has_no_more_trials_than_its_engine_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.toml").write_text("method = 'grid'\n[parameters]\nseed = [1, 2, 3]\n[run.train]\nsteps = 9\n")
    with (tmp_path / "s.toml").open("a") as file:
        file.write("[run.checkpoint]\nremote = 's3://bucket/'\n")
    sweep = load_sweep(tmp_path / "s.toml")
    started: list[int] = []

    def start_all(_: Engine, jobs: Sequence[Job], at_once: int = 0) -> list[LaunchedJob]:
        started.append(len(jobs))
        first = 2 * len(started)
        return [LaunchedJob(engine="slurm", id=f"{first + n}@1", submitted_s=0, nodes=1) for n in range(len(jobs))]

    def reached(*_: object) -> TrialOutcome:
        return TrialOutcome("failed", f"{DIVERGED} {len(started)}")

    monkeypatch.setattr(Left, "most_waiting", 2)
    monkeypatch.setattr(Left, "start_all", start_all)
    monkeypatch.setattr(Left, "poll_s", 0.0)
    monkeypatch.setattr("argosy.sweep.driver.outcome", reached)
    limits = Limits(trials=0, cores=sys.maxsize, memory_bytes=float("inf"))
    trials = Trials(tmp_path, "s", limits, LaunchOptions(on="slurm"), Left("ended"))
    Driver(sweep, tmp_path, Study(tmp_path, sweep), trials, limits, lambda text: None).run()
    assert started == [2, 1]
    remotes = [load(str(path)).checkpoint.remote for path in tmp_path.glob(f"*/{LAUNCH_FOLDER}/run.toml")]
    assert remotes == ["s3://bucket/s"] * 3, "copies of each sweep have a place of their own"


def test_conversations_are_prepared_as_trials_read_them(tmp_path: Path, corpus: Path, monkeypatch) -> None:
    chats, out = tmp_path / "chats.jsonl", tmp_path / "prepared"
    rows = [{"prompt": f"{number} + 1?", "completion": f"{number + 1}"} for number in range(20)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare = {"input": (str(chats),), "out": out, "chat_template": "chatml", "processes": 1}
    data = {"sources": {}, "seq_len": 128, "prepare": {**prepare, "validation_fraction": 0.0}}
    base = run_config(tmp_path, data=data, model={"weights": corpus}, train={"objective": "sft"})
    (tmp_path / "s.toml").write_text("method = 'grid'\n[parameters]\nseed = [1]\n[run.train]\nsteps = 9\n")

    def run(driver: Driver) -> None:
        raise Said

    monkeypatch.setattr(Driver, "run", run)
    with pytest.raises(Said):
        run_sweep(replace(load_sweep(tmp_path / "s.toml"), base=base), tmp_path / "sweep", LaunchOptions(on="local"))
    manifest = Manifest.load(out)
    assert manifest.tokenizer_sha256 == Manifest.load(corpus).tokenizer_sha256
    assert manifest.rows is not None
    assert manifest.rows.seq_len == base.data.seq_len


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("", LaunchOptions(), "its run has no data to train on"),
        ("data.sources = { d = 1.0 }\n", LaunchOptions(partition="fast"), "--on local: --partition has no meaning"),
    ],
)
@pytest.mark.parametrize("act", [run_sweep, would_sweep])
def test_a_dry_run_refuses_what_a_sweep_refuses_and_neither_writes(tmp_path: Path, act, data, options, message) -> None:
    text = f"method = 'grid'\n[parameters]\nseed = [1]\n[run]\n{data}[run.train]\nsteps = 9\n"
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        act(load_sweep(tmp_path / "s.toml"), tmp_path / "sweep", options)
    assert not (tmp_path / "sweep").exists()
