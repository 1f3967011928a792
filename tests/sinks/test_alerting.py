"""The sink that looks for alerts: it writes them down once and has them delivered, over its own restarts too."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from argosy.config.load import load
from argosy.observe.events import read_lines
from argosy.sinks import alerting
from argosy.sinks.alerting import Alerting
from argosy.sinks.sink import About

ADVICE = Path(__file__).parents[2] / "docs/advice.md"
BLOCK = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A block of a document that is a file."""
BAD = {
    "time_s": 1_700_000_010.0,
    "event": "bad_step",
    "step": 9,
    "reason": "not_finite",
    "loss": "nan",
    "grad_norm": "nan",
}


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerting, "LOOK_S", 0.0)


def run_with_a_bad_step(folder: Path) -> Path:
    """A run's folder in which the last step was not finite."""
    (folder / "events").mkdir(parents=True)
    lines = [{"step": step, "loss": 3.0, "step_time_s": 0.1, "time_s": 1_700_000_000.0 + step} for step in range(10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events/rank-0.jsonl").write_text(json.dumps(BAD) + "\n")
    return folder


def about(folder: Path, state: dict[str, Any] | None = None, **settings: Any) -> About:
    config = {"observe": {"alerts": {"on": ["nan"], **settings}}}
    return About("tiny", folder, json.loads(json.dumps(config)), {}, "", {} if state is None else state)


def told(folder: Path) -> list[tuple[str, str]]:
    return [(event["alert"], event["state"]) for event in read_lines(folder / "events/alerts.jsonl")]


def test_an_alert_is_written_down_once_also_after_a_restart(tmp_path: Path):
    folder = run_with_a_bad_step(tmp_path / "run")
    first = Alerting(about(folder))
    for _ in range(3):
        first.tick()
    again = Alerting(about(folder, json.loads(json.dumps(first.state))))
    again.tick()
    again.close(None)
    assert told(folder) == [("nan", "begins")]


def test_the_example_of_the_document_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = dict(BLOCK.findall(ADVICE.read_text()))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    run = load("alerts.toml")
    assert run.observe.alerts.are_delivered
    folder = run_with_a_bad_step(tmp_path / "run")
    sink = Alerting(about(folder, command=list(run.observe.alerts.command)))
    sink.tick()
    sink.close(None)
    assert re.match(r".*: nan begins: step 9 was not finite .+\n$", (tmp_path / "alerts.txt").read_text())
