"""Launching a run: what is refused before an engine is asked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.launch.engines.engine import Engine, Job, JobState, Request
from argosy.launch.engines.table import ENGINES
from argosy.launch.launched import launch, printed


class Memory(Engine):
    """An engine that only keeps what it is given."""

    name = "memory"
    takes = frozenset()
    jobs: dict[str, JobState] = {}

    def script(self, request: Request) -> str:
        return request.command

    def submit(self, request: Request) -> Job:
        job = Job(engine="memory", id=request.run_dir.name, submitted_s=0, nodes=1, log="")
        self.jobs[job.id] = "running"
        return job

    def state(self, job: Job) -> tuple[JobState, str]:
        return self.jobs[job.id], ""

    def stop(self, job: Job) -> None:
        self.jobs[job.id] = "ended"


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(ENGINES, "memory", Memory)
    yield
    Memory.jobs.clear()


def request_in(folder: Path, name: str) -> Request:
    return Request(RunConfig(), folder / "runs" / name, ("run.toml",), folder)


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


def test_a_run_that_is_under_way_is_not_launched_again(tmp_path):
    job = launch(request_in(tmp_path, "a"), "memory")
    with pytest.raises(UserError, match=r"its job a on memory is running. `argosy stop .*runs/a` stops it"):
        launch(request_in(tmp_path, "a"), "memory")
    Memory().stop(job)
    launch(request_in(tmp_path, "a"), "memory")


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
