"""What all engines have in common: options without a meaning are refused, logs are followed to their end."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from argosy.config.launch import EngineOptions
from argosy.config.schema import RunConfig
from argosy.engines.engine import Engine, RunJob
from argosy.engines.local import Local
from argosy.engines.record import JobState, LaunchedJob
from argosy.engines.table import ENGINES
from argosy.errors import UserError

OPTIONS = [field.name for field in fields(EngineOptions)]


def request_in(folder: Path, **options: object) -> RunJob:
    return RunJob(run=RunConfig(), run_dir=folder / "runs/a", words=("run.toml",), work_dir=folder, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_option_that_has_no_meaning_on_an_engine_is_refused(engine: str, tmp_path: Path) -> None:
    takes = ENGINES[engine].takes
    values = {"nodes": 2, "account": "team", "namespace": "training", "extra": ("a",)}
    for name, value in values.items():
        request = request_in(tmp_path, **{name: value})
        if name in takes:
            Engine.check(ENGINES[engine](), request)
        else:
            with pytest.raises(UserError, match=f"--on {engine}: --{name} has no meaning there. Leave it out"):
                Engine.check(ENGINES[engine](), request)


def test_each_option_of_a_request_has_a_meaning_somewhere() -> None:
    request = RunJob(run=RunConfig(), run_dir=Path(), words=(), work_dir=Path(), **dict.fromkeys(OPTIONS, "given"))  # type: ignore[arg-type]
    assert set(request.given) == set(OPTIONS)
    chosen = [engine for name, engine in ENGINES.items() if name != "login"]  # which hands all on to another machine's
    assert {name for engine in chosen for name in engine.takes} == set(OPTIONS)


def test_a_log_is_followed_until_its_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "out"
    states: list[JobState] = ["waiting", "running", "running", "ended"]

    def state(_: object, __: LaunchedJob) -> tuple[JobState, str]:
        with log.open("a") as file:  # a last line may come until it has ended
            file.write(f"{len(states)}\n")
        return states.pop(0), ""

    monkeypatch.setattr(Local, "state", state)
    monkeypatch.setattr("argosy.engines.engine.FOLLOW_LOOK_S", 0.01)
    job = LaunchedJob(engine="local", id="1@1", submitted_s=0, nodes=1, log=str(log))
    assert b"".join(Local().logs(job, follow=True)) == b"4\n3\n2\n1\n"
    assert b"".join(Local().logs(job, follow=False)) == b"4\n3\n2\n1\n"
