"""A sink is held from outside: whatever it does, it is ended, told of once, and tried again within bounds."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from argosy.config.load import load
from argosy.config.observe import SinksConfig
from argosy.observe.events import Events
from argosy.sinks.follower import SINK_RESTARTS, SupervisedSink, tell_the_rest
from run_folder import RunFolder
from waiting import wait_until

LIMITS = {"timeout_s": 30.0, "flush_s": 5.0, "memory_bytes": 2**29}


@pytest.fixture(autouse=True)
def _bad_sinks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


def sink(run: RunFolder, name: str, pause_s: float = 60.0, **limits: Any) -> SupervisedSink:
    config = SinksConfig.model_validate({**LIMITS, **limits})
    return SupervisedSink(run.path, name, config, Events(run.path, "follower"), replace(SINK_RESTARTS, pause_s=pause_s))


def keep_until(one: SupervisedSink, condition: Callable[[], bool]) -> None:
    def holds() -> bool:
        one.keep()
        return condition()

    wait_until(holds)


def offs(run: RunFolder) -> list[dict[str, Any]]:
    return [event for event in run.events_of("follower") if event["event"] == "sink_off"]


def told(run: RunFolder) -> list[str]:
    path = run.path / "good.txt"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises_at_import:Sink", "a library of it is missing"),
        ("bad_sinks:Missing", "Missing"),
        ("bad_sinks:RaisesAtStart", "RuntimeError: no server at http://***@example.org"),
        ("bad_sinks:RaisesAtWrite", "ValueError: cannot write"),
        ("bad_sinks:Exits", "its process ended: exit code 7"),
        ("bad_sinks:Floods", "MemoryError"),
    ],
)
def test_a_sink_that_fails_is_switched_off_with_one_message(tmp_path, capsys, name, why):
    run = RunFolder(tmp_path)
    run.step(0)
    one = sink(run, name)
    keep_until(one, lambda: bool(offs(run)))
    assert not one.is_running
    assert why in offs(run)[0]["why"]
    assert offs(run)[0]["again_s"] == 60.0
    said = capsys.readouterr().err
    assert said.count(f"argosy: the sink {name} is switched off: ") == 1
    assert "training goes on" in said


def test_a_sink_that_hangs_is_ended(tmp_path):
    run = RunFolder(tmp_path)
    run.step(0)
    one = sink(run, "bad_sinks:Hangs", timeout_s=2.0)
    keep_until(one, lambda: bool(offs(run)))
    assert offs(run)[0]["why"] == "it did not answer for 2 s"
    assert not one.is_running


def test_a_sink_is_tried_again_so_often_and_no_more(tmp_path, capsys):
    run = RunFolder(tmp_path)
    one = sink(run, "bad_sinks:Missing", pause_s=0.01)
    keep_until(one, lambda: len(offs(run)) == SINK_RESTARTS.most_failures)
    assert [event["again_s"] for event in offs(run)] == [0.01, 0.02, 0.04, 0.08, None]
    one.keep()
    assert not one.is_running
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "not tried again" in said[1]


def test_a_sink_that_was_killed_goes_on_with_the_lines_that_it_has_not_had(tmp_path):
    run = RunFolder(tmp_path)
    run.step(0, 1)
    one = sink(run, "bad_sinks:Good", pause_s=0.01)
    kept = tmp_path / "sinks/bad_sinks.Good.json"
    keep_until(one, lambda: kept.exists() and '"told": 2' in kept.read_text() and bool(run.events_of("follower")))
    os.kill(run.events_of("follower")[0]["pid"], signal.SIGKILL)
    keep_until(one, lambda: bool(offs(run)))
    run.step(2)
    keep_until(one, lambda: "2" in told(run))
    one.finish()
    keep_until(one, lambda: not one.is_running)
    assert told(run) == ["start", "0 1", "start", "2", "close"]
    assert len(offs(run)) == 1


def test_a_sink_that_is_off_at_the_end_is_told_the_rest(tmp_path):
    run = RunFolder(tmp_path)
    one = sink(run, "bad_sinks:Good")
    run.step(0)
    one.finish()  # it was never started
    keep_until(one, lambda: not one.is_running)
    assert told(run) == ["start", "0", "close"]


@pytest.mark.parametrize("name", ["RaisesAtClose", "HangsAtClose"])
def test_a_sink_that_cannot_be_closed_is_ended(tmp_path, name):
    run = RunFolder(tmp_path)
    one = sink(run, f"bad_sinks:{name}", timeout_s=2.0)
    one.keep()
    one.finish()
    keep_until(one, lambda: not one.is_running)
    assert [event["again_s"] for event in offs(run)] == [None]


def test_a_finished_run_tells_its_sinks_what_they_lack_and_that_once(tmp_path):
    run = RunFolder(tmp_path, sinks=["bad_sinks:Good"])
    run.step(0, 1)
    (tmp_path / "report.json").write_text('{"steps": 2, "status": "finished"}')
    for _ in range(2):
        tell_the_rest(tmp_path, load(tmp_path / "run.toml"), Events(tmp_path, "launcher"))
        assert told(run) == ["start", "0 1", "close"]
