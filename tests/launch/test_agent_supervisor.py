"""The supervisor of a node's agent: when it starts another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.launch import agent_supervisor
from argosy.launch.agent_supervisor import AgentSupervisor

KILLED = 137


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_supervisor, "AGENT_RESTARTS", replace(agent_supervisor.AGENT_RESTARTS, pause_s=0.01))


def hold(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, outcomes: list[int], steps: list[int]) -> int:
    """Return what the supervisor of a script returns; outcomes, steps: what the run's folder says, call by call."""
    monkeypatch.setattr(agent_supervisor, "outcome", lambda *_: (outcomes.pop(0), "so it says"))
    monkeypatch.setattr(agent_supervisor, "last_step", lambda _: steps.pop(0) if len(steps) > 1 else steps[0])
    before = {number: signal.getsignal(number) for number in agent_supervisor.STOP_SIGNALS}
    try:
        return AgentSupervisor(folder, ["bash", "-c", f"echo >> {folder}/starts; {script}"]).supervise()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines())


def test_an_agent_that_is_killed_is_started_again_until_the_run_is_finished(tmp_path, monkeypatch):
    script = f"[ $(wc -l < {tmp_path}/starts) = 3 ] || kill -KILL $$"
    assert hold(tmp_path, monkeypatch, script, [75, 75, 0], [1, 5, 5, 9, 9]) == 0
    assert starts(tmp_path) == 3


@pytest.mark.parametrize("code", [1, 2, 65, 69, 70, 74])
def test_an_agent_that_would_end_so_again_is_not_started_again(tmp_path, monkeypatch, code):
    assert hold(tmp_path, monkeypatch, f"exit {code}", [], [0]) == code
    assert starts(tmp_path) == 1


def test_a_run_that_has_failed_elsewhere_is_not_started_again(tmp_path, monkeypatch):
    assert hold(tmp_path, monkeypatch, "exit 75", [70], [0]) == 70
    assert starts(tmp_path) == 1


def test_three_starts_without_a_step_are_the_last(tmp_path, monkeypatch):
    assert hold(tmp_path, monkeypatch, "kill -KILL $$", [75] * 9, [4]) == KILLED
    assert starts(tmp_path) == 3


def test_a_run_that_is_stopped_for_good_is_not_started_again(tmp_path, monkeypatch):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/stop").touch()
    assert hold(tmp_path, monkeypatch, "exit 143", [75], [0, 5]) == 143
    assert starts(tmp_path) == 1


def test_a_signal_is_passed_on_and_ends_the_supervisor_too(tmp_path):
    agent = (
        f"trap 'echo saved > {tmp_path}/saved; exit 143' TERM; echo > {tmp_path}/ready; while :; do sleep 0.05; done"
    )
    words = [sys.executable, "-m", "argosy.launch.agent_supervisor", str(tmp_path), "bash", "-c", agent]
    process = subprocess.Popen(words)
    end = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == 143
    assert (tmp_path / "saved").exists()
