"""Programs go to engines that start them, with options that have a meaning there."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from argosy.config.launch import LaunchOptions, ProgramEngine
from argosy.engines.local import Local
from argosy.engines.record import LaunchedJob
from argosy.engines.table import ENGINES, engine_for_programs
from argosy.errors import UserError

CALLED = {"cpus_per_node": "--cpus", "time": "--time", "address": "--address"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"on": "kubernetes"}, "--on kubernetes: workers are not supported there. Choose one of: local, ray, slurm."),
        ({"on": "ssh"}, "--on ssh: workers are not supported there. Choose one of: local, ray, slurm."),
        ({"cpus_per_node": 2, "time": "1:00"}, "--on local: --cpus, --time has no meaning there. Leave it out; known: "
         "none."),
        ({"on": "slurm", "address": "h:1"}, "--on slurm: --address has no meaning there. Leave it out; known: --cpus, "
         "--time."),
    ],
)  # fmt: skip
def test_what_an_engine_does_not_do_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        engine_for_programs("workers", LaunchOptions(**asked), CALLED)
    assert str(refused.value) == message


def test_commands_that_start_programs_offer_the_engines_that_do() -> None:
    assert {*get_args(ProgramEngine)} == {name for name, engine in ENGINES.items() if engine.starts_programs}


def test_slurm_that_is_not_there_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="--on slurm: there is no sbatch here"):
        engine_for_programs("workers", LaunchOptions(on="slurm"), CALLED)


def test_each_engine_has_the_name_that_it_is_found_by() -> None:
    assert all(kind.name == name for name, kind in ENGINES.items())


def test_one_job_that_cannot_be_stopped_keeps_none_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []

    def stop(_: Local, job: LaunchedJob) -> None:
        if job.id == "1@1":
            raise UserError("no way")
        stopped.append(job.id)

    monkeypatch.setattr(Local, "stop", stop)
    jobs = [LaunchedJob(engine="local", id=f"{number}@1", submitted_s=0, nodes=1) for number in (1, 2, 3)]
    with pytest.raises(UserError, match="no way"):
        Local().stop_all(jobs)
    assert stopped == ["2@1", "3@1"]
