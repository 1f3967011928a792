"""Launching a run: what is refused before an engine is asked."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from argosy.cli.launch import what_next
from argosy.config.schema import RunConfig
from argosy.engines.engine import Engine, RunJob
from argosy.engines.record import JobState, LaunchedJob
from argosy.engines.table import ENGINES
from argosy.errors import UserError
from argosy.files import lock_or_holder
from argosy.launch import ray_job
from argosy.launch.launched import jobs_of, launched_in, printed
from argosy.launch.launching import launch, launch_sites
from argosy.launch.requeue import IDLE_JOBS_FILE


class Memory(Engine):
    """An engine that only keeps what it is given."""

    name = "memory"
    takes = frozenset()
    jobs: dict[str, JobState] = {}

    def check_job(self, job: LaunchedJob) -> None:
        return

    def script(self, request: RunJob) -> str:
        return request.command

    def start(self, request: RunJob) -> LaunchedJob:
        job = LaunchedJob(engine="memory", id=request.run_dir.name, submitted_s=0, nodes=1, log="")
        self.jobs[job.id] = "running"
        return job

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        if self.jobs[job.id] == "unknown":
            raise UserError("its controller\nis away.")
        return self.jobs[job.id], ""

    def stop(self, job: LaunchedJob) -> None:
        self.jobs[job.id] = "ended"


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(ENGINES, "memory", Memory)
    yield
    Memory.jobs.clear()


def request_in(folder: Path, name: str) -> RunJob:
    return RunJob(run=RunConfig(), run_dir=folder / "runs" / name, words=("run.toml",), work_dir=folder)


def test_two_runs_with_one_secret_of_the_environment_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ARGOSY_SECRET", "s" * 32)
    first = launch(request_in(tmp_path, "a"), "memory")
    assert "s" * 32 not in (tmp_path / "runs/a/launch/job.json").read_text()
    with pytest.raises(UserError, match=r"runs/b and .*runs/a have one secret.* Unset ARGOSY_SECRET"):
        launch(request_in(tmp_path, "b"), "memory")
    assert not (tmp_path / "runs/b").exists()
    Memory().stop(first)
    launch(request_in(tmp_path, "b"), "memory")


def test_a_copy_of_a_run_s_folder_has_its_secret_and_is_refused(tmp_path):
    launch(request_in(tmp_path, "a"), "memory")
    secret = tmp_path / "runs/a/.secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    shutil.copytree(tmp_path / "runs/a", tmp_path / "runs/b")
    (tmp_path / "runs/b/launch/job.json").unlink()
    with pytest.raises(UserError, match=r"delete \.secret in it"):
        launch(request_in(tmp_path, "b"), "memory")
    (tmp_path / "runs/b/.secret").unlink()
    launch(request_in(tmp_path, "b"), "memory")


def test_a_command_that_is_shown_can_be_typed_whatever_the_folder_is_called(tmp_path):
    launch(request_in(tmp_path, "a run"), "memory")
    with pytest.raises(UserError, match=r"`argosy stop '.*runs/a run'` stops it"):
        launch(request_in(tmp_path, "a run"), "memory")
    assert shlex.split(what_next(tmp_path / "a run"))[3] == str(tmp_path / "a run")


def test_a_run_that_is_under_way_is_not_launched_again(tmp_path):
    job = launch(request_in(tmp_path, "a"), "memory")
    with pytest.raises(UserError, match=r"its job a on memory is running. `argosy stop .*runs/a` stops it"):
        launch(request_in(tmp_path, "a"), "memory")
    Memory().stop(job)
    idle = tmp_path / "runs/a/launch" / IDLE_JOBS_FILE
    idle.write_text('{"step": -1, "idle": 3}')
    launch(request_in(tmp_path, "a"), "memory")
    assert not idle.exists(), "jobs of the launch before that made no step do not count"


def test_the_record_has_the_options_of_the_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(Memory, "takes", frozenset({"gpus_per_node", "extra"}))
    launch(replace(request_in(tmp_path, "a"), gpus_per_node=8, extra=("--nice=5",)), "memory")
    assert LaunchedJob.load(tmp_path / "runs/a").options == ("--gpus-per-node", "8", "--extra=--nice=5")


def test_a_job_that_is_submitted_by_hand_into_a_run_that_has_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_job, "connect", lambda what_for: "127.0.0.1:9")
    request = request_in(tmp_path, "a")
    job = launch(request, "memory")
    with pytest.raises(UserError, match=r"its job a on memory is running"):
        ray_job.hold(request, "raysubmit_1")
    assert LaunchedJob.load(request.run_dir).id == job.id, "the run's job can be stopped as before"
    monkeypatch.setattr(ray_job, "_supervise", lambda request, log: 0)
    Memory().stop(job)
    assert ray_job.hold(request, "raysubmit_1") == 0 and LaunchedJob.load(request.run_dir).id == "raysubmit_1"


def test_a_run_whose_engine_gives_no_answer_is_not_launched_again(tmp_path):
    launch(request_in(tmp_path, "a"), "memory")
    Memory.jobs["a"] = "unknown"
    with pytest.raises(UserError, match=r"may still be there.*its controller is away\..*remove .*launch/job.json"):
        launch(request_in(tmp_path, "a"), "memory")
    (found,) = launched_in(tmp_path / "runs")
    assert (found.state, found.why) == ("unknown", "its controller is away.")
    (tmp_path / "runs/a/launch/job.json").unlink()
    launch(request_in(tmp_path, "a"), "memory")


def test_a_record_that_cannot_be_read_does_not_hide_the_other_runs(tmp_path):
    launch(request_in(tmp_path, "a"), "memory")
    (tmp_path / "runs/b/launch").mkdir(parents=True)
    (tmp_path / "runs/b/launch/job.json").write_text("{")
    (tmp_path / "runs/c/launch").mkdir(parents=True)
    os.mkfifo(tmp_path / "runs/c/launch/job.json")
    found = {run.id: run for run in launched_in(tmp_path / "runs")}
    assert {name: run.state for name, run in found.items()} == {"a": "running", "b": "unknown", "c": "unknown"}
    assert "is no record of a launched run" in found["b"].why and "not a regular file" in found["c"].why


def test_only_a_job_that_printed_something_is_said_to_have_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(Memory, "files", lambda self, job: {"": tmp_path / "out"})
    job = launch(request_in(tmp_path, "a"), "memory").model_copy(update={"log": "memory.out"})
    job.save(tmp_path / "runs/a")
    Memory().stop(job)
    assert [run.why for run in launched_in(tmp_path / "runs")] == [""]
    (tmp_path / "out").write_text("one\n")
    assert "argosy logs" in launched_in(tmp_path / "runs")[0].why


def test_a_run_that_is_trained_by_hand_after_its_job_trains(tmp_path, monkeypatch):
    Memory().stop(launch(request_in(tmp_path, "a"), "memory"))
    read = SimpleNamespace(state="training", why="", last_line={"step": 4})
    monkeypatch.setattr("argosy.launch.launched.is_run", lambda _: True)
    monkeypatch.setattr("argosy.launch.launched.RunReader", SimpleNamespace(read=lambda _: read))
    with (tmp_path / "runs/a/.lock").open("a+") as lock:
        assert lock_or_holder(lock) is None
        assert [run.state for run in launched_in(tmp_path / "runs")] == ["training"]
        with pytest.raises(UserError, match=rf"runs/a is in use by process {os.getpid()}\. Wait for it"):
            launch(request_in(tmp_path, "a"), "memory")
    assert [run.state for run in launched_in(tmp_path / "runs")] == ["ended"]


def test_a_run_that_was_not_launched_prints_what_its_folder_has(tmp_path):
    run = tmp_path / "runs/a"
    (run / "logs").mkdir(parents=True)
    (run / "run.toml").write_text("")
    (run / "metrics.jsonl").touch()
    (run / "logs/worker-1.log").write_text("one\n")
    (run / "logs/coordinator.log").write_text("two\nthree")
    assert b"".join(printed(run, follow=False)) == b"coordinator: two\ncoordinator: three\nworker-1: one\n"
    with pytest.raises(UserError, match=r"no such folder"):
        list(printed(tmp_path / "runs/b", follow=False))
    with pytest.raises(UserError, match=r"^\S+runs: not a run"):
        list(printed(tmp_path / "runs", follow=False))


def site(folder: Path, name: str, engine: str = "memory") -> tuple[str, str, RunJob]:
    return name, engine, request_in(folder, f"two/sites/{name}")


def test_sites_of_a_run_have_one_secret_and_a_job_each(tmp_path):
    list(launch_sites([site(tmp_path, "oslo"), site(tmp_path, "lyon")]))
    assert (tmp_path / "runs/two/.secret").exists() and not (tmp_path / "runs/two/sites/oslo/.secret").exists()
    assert set(jobs_of(tmp_path / "runs/two")) == {"lyon", "oslo"}
    assert set(jobs_of(tmp_path / "runs/two/sites/oslo")) == {""}
    assert [run.id for run in launched_in(tmp_path / "runs")] == ["two/sites/lyon", "two/sites/oslo"]
    assert [run.id for run in launched_in(tmp_path / "runs/two/sites/oslo")] == ["oslo"]
    with pytest.raises(UserError, match=r"its job oslo on memory is running"):
        list(launch_sites([site(tmp_path, "bern"), site(tmp_path, "oslo")]))
    assert not (tmp_path / "runs/two/sites/bern").exists()  # nothing is started if one cannot be
    with pytest.raises(UserError, match=r"not a run: it has no run\.toml"):
        jobs_of(tmp_path / "runs")


def test_a_site_that_is_refused_does_not_hide_those_that_were_launched(tmp_path, monkeypatch):
    class Full(Memory):
        def start(self, request: RunJob) -> LaunchedJob:
            raise UserError("there is no place.")

    monkeypatch.setitem(ENGINES, "full", Full)
    with pytest.raises(UserError, match=r"site lyon: there is no place\.$"):
        list(launch_sites([site(tmp_path, "lyon", "full")]))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=r"site lyon: there is no place. Launched before that: oslo."):
        list(launch_sites([site(tmp_path, "oslo"), site(tmp_path, "lyon", "full")]))
    assert not (tmp_path / "runs/two/sites/lyon").exists()


def test_what_sites_print_has_the_site_before_each_line(tmp_path, monkeypatch):
    list(launch_sites([site(tmp_path, "oslo"), site(tmp_path, "lyon")]))
    for name in ("oslo", "lyon"):
        (tmp_path / name).write_text("one\ntwo")
    monkeypatch.setattr(Memory, "files", lambda self, job: {"": tmp_path / job.id})
    text = b"".join(printed(tmp_path / "runs/two", follow=False))
    assert sorted(text.splitlines()) == [b"lyon | one", b"lyon | two", b"oslo | one", b"oslo | two"]
