"""What `argosy stop` does with the jobs of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from argosy.cli import stop
from argosy.errors import UserError
from argosy.launch import site_jobs
from argosy.launch.engines import table


@dataclass
class Job:
    id: str
    engine: str = "ssh"


@dataclass
class Engine:
    stopped: list[str] = field(default_factory=list)

    def state(self, job: Job) -> tuple[str, str]:
        if job.id == "unreachable":
            raise UserError("there is no way to it")
        return "ended" if job.id == "over" else "running", ""

    def stop(self, job: Job) -> None:
        self.stopped.append(job.id)


def test_a_site_that_cannot_be_reached_does_not_keep_the_others_from_stopping(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine = Engine()
    jobs = {"lyon": Job("unreachable"), "oslo": Job("1"), "rome": Job("over"), "wien": Job("2")}
    monkeypatch.setattr(site_jobs, "jobs_of", lambda _: jobs)
    monkeypatch.setattr(table, "engine_of", lambda _: engine)
    with pytest.raises(UserError, match="site lyon: there is no way to it"):
        stop.main([str(tmp_path)])
    assert engine.stopped == ["1", "2"]
    said = capsys.readouterr().out.splitlines()
    assert [line.split("site ")[1][:4] for line in said] == ["oslo", "rome", "wien"]
