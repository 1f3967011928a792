"""`argosy stacks`: where each process of a run is, while it trains and while it hangs."""

from __future__ import annotations

import json
import os
import signal

import pytest

from argosy.observe.events import read_lines
from waiting import wait_until


@pytest.fixture
def training(folder):
    """A run that trains; it ends with the test."""
    begun = []

    def start(**variables: str):
        folder.write_run(steps=100_000, every_steps=100_000)
        options = ("--evaluate.every_steps", "0", "--resilience.hang_s", "6")
        begun.append(folder.start("train", "run.toml", "--run-dir", "run", *options, **variables))
        metrics = folder.path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size, process=begun[-1])

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def pid_of(folder, slot: int) -> int:
    events = read_lines(folder.path / "run" / "events" / "launcher.jsonl")
    return int([e["pid"] for e in events if e["event"] == "worker_started" and e["slot"] == slot][-1])


def test_the_stacks_of_all_ranks_are_shown_and_one_that_is_stopped_is_named(folder, training):
    training()
    shown = folder.argosy_here("stacks", "run")
    # Of a stack the innermost 100 frames are shown: where torch loads something, the loop is beyond them.
    assert "argosy/" in shown and "kept in run/stacks" in shown
    os.kill(pid_of(folder, 1), signal.SIGSTOP)
    try:
        answers = folder.documents("stacks", "run")
    finally:
        os.kill(pid_of(folder, 1), signal.SIGCONT)
    by_rank = {worker["rank"]: worker for answer in answers for worker in answer["workers"]}
    assert "argosy/" in by_rank[0]["stack"] and "is stopped" in by_rank[1]["problem"]
    made = len(read_lines(folder.path / "run" / "metrics.jsonl"))
    wait_until(lambda: len(read_lines(folder.path / "run" / "metrics.jsonl")) > made)  # it trains on


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing", "no such folder"), ("corpus", "not a run"), ("done", "is not being trained")],
)
def test_what_has_no_stacks_is_said(folder, refused, name, said):
    (folder.path / "corpus").mkdir()
    (folder.path / "done").mkdir()
    (folder.path / "done" / "run.toml").write_text('name = "done"\n')
    refused("stacks", name, said=(name, said))


@pytest.mark.slow
def test_a_world_that_hangs_is_written_down_before_it_ends(folder, training):
    training(ARGOSY_FAULTS="hang@exchange:step=30,rank=1")
    events = folder.path / "run" / "events" / "launcher.jsonl"
    found = wait_until(lambda: [e for e in read_lines(events) if e["event"] == "stacks"])
    (answer,) = (json.loads(path.read_text()) for path in (folder.path / "run" / "stacks").glob("hang-*/*.json"))
    assert found[0]["generation"] == 1 and {worker["rank"] for worker in answer["workers"]} == {0, 1}
    assert all("stack" in worker and worker["collectives"] for worker in answer["workers"])
