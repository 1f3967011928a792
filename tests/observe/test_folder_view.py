"""What is shown of a run is read from its folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from argosy.observe import folder_view
from argosy.observe.events import JsonLines
from argosy.observe.folder_view import Curve, FolderView
from argosy.observe.heartbeat import Heartbeat
from argosy.plan.plan import Plan

PREDICTED = """
[prediction]
cluster = "this CPU"
step_s = [0.1, 0.2, 0.3]
memory_bytes = [1e6, 2e6, 3e6]

[prediction.seconds]
matmul = 0.15
optimizer = 0.05
"""


def step(number: int, loss: float | None = 3.0, **seconds: float) -> dict[str, object]:
    parts = {"forward": 0.1, "backward": 0.2, "optimizer": 0.05, "other": 0.05, **seconds}
    took = sum(value for name, value in parts.items() if name != "evaluate")
    return {"step": number, "loss": loss, "step_time_s": took, "seconds": {**parts, "step": sum(parts.values())}}


def write(folder: Path, *records: dict[str, object]) -> None:
    for record in records:
        JsonLines(folder / "metrics.jsonl").write(record)


def test_an_empty_folder_is_a_run_that_has_not_begun(tmp_path):
    view = FolderView(tmp_path).look()
    assert view.name == tmp_path.name and view.step == 0 and view.left_s is None


def test_a_site_is_told_from_the_others(tmp_path):
    (tmp_path / "run.toml").write_text(
        'name = "two"\nsite = "oslo"\n[[sites]]\nname = "oslo"\n[[sites]]\nname = "lyon"\n'
    )
    assert FolderView(tmp_path).look().name == "two oslo"


def test_curves_parts_and_time_left_follow_the_lines(tmp_path):
    (tmp_path / "run.toml").write_text('name = "mine"\n[train]\nsteps = 20\n')
    Plan(dp_replicate=2).save(tmp_path / "plan.toml", PREDICTED)
    folder = FolderView(tmp_path)
    write(tmp_path, *(step(number, 3.0 - number / 10) for number in range(9)), {"step": 8, "validation_loss": 2.5})
    write(tmp_path, step(9, None, evaluate=1.0))
    view = folder.look()
    assert (view.name, view.processes, view.step, view.steps) == ("mine", 2, 10, 20)
    assert view.losses[-1] == (8, 2.2) and view.validation_loss == 2.5
    assert view.parts == pytest.approx({"forward_backward": 0.3, "communication": 0, "optimizer": 0.05, "rest": 0.05})
    assert view.predicted_parts["forward_backward"] == 0.15 and view.predicted_step_s == 0.2
    assert view.left_s == pytest.approx(10 * (0.4 + 1.0 / 10))  # with one evaluation in ten steps


def test_steps_that_are_run_again_replace_what_there_was(tmp_path):
    folder = FolderView(tmp_path)
    write(tmp_path, step(0, 5.0), step(1, 4.0), step(2, 3.0))
    folder.look()
    (tmp_path / "metrics.jsonl").write_text("")
    folder.look()
    write(tmp_path, step(1, 4.5))
    assert folder.look().losses == [(0, 5.0), (1, 4.5)]


def test_a_long_curve_is_thinned_out_and_keeps_its_ends():
    curve = Curve()
    for number in range(3 * folder_view.MOST_POINTS):
        curve.add(number, 1.0)
    assert len(curve.points) <= folder_view.MOST_POINTS
    assert curve.points[0][0] == 0 and curve.points[-1][0] == 3 * folder_view.MOST_POINTS - 1


def test_events_of_all_processes_stand_in_order_each_once(tmp_path):
    launcher, rank = (JsonLines(tmp_path / "events" / f"{name}.jsonl") for name in ("launcher", "rank-0"))
    folder = FolderView(tmp_path)
    launcher.write({"time_s": 2.0, "event": "worker_died", "rank": 1, "why": "signal SIGKILL"})
    launcher.write({"time_s": 4.0, "event": "oom_kill", "why": "the kernel killed it", "action": "alarm"})
    rank.write({"time_s": 1.0, "event": "save", "step": 100})
    rank.write({"time_s": 3.0, "event": "verified", "step": 100})
    rank.write({"time_s": 5.0, "event": "save"})  # a line that says less than it should
    for _ in range(2):
        words = [words for _, words, _ in folder.look().events]
    assert words == ["saved after 100 steps", "worker 1 died: signal SIGKILL", "the kernel killed it"]


def test_files_that_are_damaged_are_not_shown(tmp_path):
    (tmp_path / "run.toml").write_text("name = ")
    (tmp_path / "plan.toml").write_text("plan = 3")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "lo')
    assert FolderView(tmp_path).look().step == 0


def test_ranks_are_those_of_the_newest_world_and_one_that_stands_still_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_view, "STANDS_S", 0.02)
    heartbeat = Heartbeat(tmp_path)
    folder = FolderView(tmp_path)
    folder.heartbeats = tmp_path
    assert folder.look().ranks == {}
    heartbeat.join(2, 3, dict)
    for number in (4, 5):
        heartbeat.begin(number)
        heartbeat.took(0.5 * number)
    heartbeat.enter("backward")
    view = folder.look()
    assert view.ranks == {3: 2.25} and not view.standing_s
    time.sleep(0.05)
    assert list(folder.look().standing_s) == [3]
    heartbeat.close()


def test_ranks_of_other_machines_are_those_that_their_nodes_wrote_down(tmp_path):
    for node, generation, ranks in (("a", 2, [0, 1]), ("b", 2, [2, 3]), ("gone", 1, [4, 5])):
        line = {"generation": generation, "ranks": ranks, "own": [[7, [0.1, 0.2]], [8, [0.3, 0.4]]]}
        JsonLines(tmp_path / "nodes" / f"{node}.jsonl").write(line)
    JsonLines(tmp_path / "nodes" / "odd.jsonl").write({"ranks": 3})
    assert FolderView(tmp_path).look().ranks == {0: 0.3, 1: 0.4, 2: 0.3, 3: 0.4}


def test_a_rank_that_runs_more_microbatches_is_not_shown_as_slow(tmp_path):
    own, many = [[8, [0.9, 0.3, 0.3]]], [[2, [3, 1, 1]]]
    line = {"generation": 1, "ranks": [0, 1, 2], "own": own, "microbatches": many}
    JsonLines(tmp_path / "nodes" / "a.jsonl").write(line)
    assert FolderView(tmp_path).look().ranks == pytest.approx(dict.fromkeys(range(3), 0.3))
