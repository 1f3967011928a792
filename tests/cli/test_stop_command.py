"""What `argosy stop` does with the jobs of a run, and what it says."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.cli import stop
from argosy.engines.engine import Engine, RunJob
from argosy.engines.record import LAUNCH_FOLDER, JobState, LaunchedJob
from argosy.engines.table import ENGINES
from argosy.errors import UserError


class Memory(Engine):
    """An engine whose jobs are called as their states are."""

    name = "memory"
    takes = frozenset()
    stopped: list[str] = []

    def check_job(self, job: LaunchedJob) -> None:
        return

    def script(self, request: RunJob) -> str:
        raise NotImplementedError

    def start(self, request: RunJob) -> LaunchedJob:
        raise NotImplementedError

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        states: dict[str, JobState] = {"over": "ended", "queued": "waiting"}
        if job.id in ("cut-off", "silent"):
            raise UserError("its controller is away.")
        return states.get(job.id, "running"), ""

    def stop(self, job: LaunchedJob) -> None:
        if job.id == "cut-off":
            raise UserError("there is no way to it.")
        self.stopped.append(job.id)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A run of several sites, each with a job."""
    monkeypatch.setitem(ENGINES, "memory", Memory)
    for site, job in {"lyon": "cut-off", "oslo": "1", "rome": "over", "wien": "queued", "york": "silent"}.items():
        folder = tmp_path / "run/sites" / site
        (folder / LAUNCH_FOLDER).mkdir(parents=True)
        LaunchedJob(engine="memory", id=job, submitted_s=0, nodes=1).save(folder)
    yield tmp_path / "run"
    Memory.stopped.clear()


def test_each_site_is_told_and_what_becomes_of_it_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        UserError, match=r"site lyon: its job cut-off on memory may not have been stopped: there is no way to it"
    ):
        stop.main([str(run)])
    assert Memory.stopped == ["1", "queued", "silent"]
    said = [line.split("site ")[1] for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in said] == ["oslo", "rome", "wien", "york"]
    assert "saves and ends" in said[0] and "has ended already" in said[1]
    assert "is taken out of the queue" in said[2] and "saves" not in said[2]
    assert "whether it still runs is not known: its controller is away." in said[3]


def test_a_run_that_has_outlived_its_job_is_told_with_its_process(run: Path) -> None:
    """Its agents' supervisors were killed, say: no engine finds the agents any more."""
    with (run / "sites/rome/.lock-h1").open("w") as lock:
        print("4711\nof this boot", file=lock, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="rome: its job over on memory has ended, but process 4711 on h1 trains"):
            stop.main([str(run)])
