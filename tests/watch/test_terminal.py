"""Runs in a terminal, from their folders."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import termios
import time
from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.observe.events import JsonLines
from argosy.observe.heartbeat import Heartbeat
from argosy.plan.plan import Plan
from argosy.watch import terminal
from argosy.watch.terminal import Curve, FolderView
from watched import BEGAN_S, H100, start

PREDICTED = """
[prediction]
cluster = "this CPU"
step_s = [0.1, 0.2, 0.3]
memory_bytes = [1e6, 2e6, 3e6]

[prediction.seconds]
matmul = 0.15
optimizer = 0.05

[prediction.memory]
weights = 1e6

[prediction.traffic]
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
    ramp = "[{until_step = 15, global_batch = 4}]"
    (tmp_path / "run.toml").write_text(f'name = "mine"\n[train]\nsteps = 20\nglobal_batch = 8\nbatch_ramp = {ramp}\n')
    view = FolderView(tmp_path).look()
    assert view.left_s == pytest.approx((5 + 5 * 2) * 0.5), "steps of twice the batch are longer"
    assert view.predicted_step_s is None and view.predicted_parts == {}, "that is a step of the largest batch"
    write(tmp_path, *(step(number) for number in range(10, 15)), step(15, forward=0.5))
    view = FolderView(tmp_path).look()
    assert view.predicted_step_s == 0.2 and view.parts["forward_backward"] == pytest.approx(0.7)
    assert view.left_s == pytest.approx(4 * (0.8 + 1.0 / 16))
    rank = JsonLines(tmp_path / "events/rank-0.jsonl")
    rank.write(start(plan="dp_shard=2"))
    rank.write(start(step=16, plan="dp_shard=4"))
    write(tmp_path, step(16, forward=0.3))
    assert FolderView(tmp_path).look().parts["forward_backward"] == pytest.approx(0.5), "that of the plan in force"


def test_the_time_left_to_a_worker_is_that_of_its_own_steps(tmp_path):
    (tmp_path / "run.toml").write_text('name = "mine"\n[train]\nsteps = 40\n')
    Plan(sync="async").save(tmp_path / "plan.toml")
    write(tmp_path, *(step(number) for number in range(0, 20, 2)))
    assert FolderView(tmp_path).look().left_s == pytest.approx(21 * 10 / 19 * 0.4)


def test_a_run_in_minutes_has_as_many_steps_as_fit(tmp_path):
    (tmp_path / "run.toml").write_text('name = "mine"\n[train]\nminutes = 1.0\n')
    write(tmp_path, *map(step, range(10)))
    assert FolderView(tmp_path).look().steps is None
    JsonLines(tmp_path / "events/rank-0.jsonl").write({"time_s": 1.0, "event": "length", "steps": 40})
    view = FolderView(tmp_path).look()
    assert view.steps == 40 and view.left_s == pytest.approx(30 * 0.4)


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
    for number in range(3 * terminal.CURVE_POINTS):
        curve.add(number, 1.0)
    assert len(curve.points) <= terminal.CURVE_POINTS
    assert curve.points[0][0] == 0 and curve.points[-1][0] == 3 * terminal.CURVE_POINTS - 1


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


def test_stops_are_shown_beside_the_expected_ones_by_component(tmp_path):
    Plan(dp_shard=64).save(tmp_path / "plan.toml")
    folder, rank, launcher = (
        FolderView(tmp_path),
        *(JsonLines(tmp_path / "events" / f"{process}.jsonl") for process in ("rank-0", "launcher")),
    )
    rank.write(start(hardware=H100))
    assert folder.look().stops == []
    for number, why in enumerate(("CUDA error: uncorrectable ECC error encountered", "signal SIGKILL"), start=1):
        at_s = BEGAN_S + number * 720_000
        launcher.write({"time_s": at_s, "event": "worker_died", "rank": 1, "exit_code": 1, "why": why})
        rank.write(start(step=number, at_s=at_s + 60.0, hardware=H100))
        rank.write({"time_s": at_s + 61, "event": "start"})  # a line that says less than it should
    folder = FolderView(tmp_path)
    (in_all, style), (first, style_of_first), *others = folder.look().stops
    assert in_all.startswith("2 seen, ") and in_all.endswith(" expected (0 to 2)") and not style
    assert first.startswith("HBM 1, ") and not style_of_first
    assert others and all(re.fullmatch(r"[\w ,]+ 0, [\d.]+ expected", words) for words, _ in others)


def test_files_that_are_damaged_are_not_shown(tmp_path):
    (tmp_path / "run.toml").write_text("name = ")
    (tmp_path / "plan.toml").write_text("plan = 3")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "lo')
    assert FolderView(tmp_path).look().step == 0


def test_ranks_are_those_of_the_newest_world_and_one_that_stands_still_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(terminal, "RANK_STANDS_S", 0.02)
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
        line = {"time_s": 1.0, "generation": generation, "ranks": ranks, "own": [[7, [0.1, 0.2]], [8, [0.3, 0.4]]]}
        JsonLines(tmp_path / "nodes" / f"{node}.jsonl").write(line)
    JsonLines(tmp_path / "nodes" / "odd.jsonl").write({"ranks": 3})
    assert FolderView(tmp_path).look().ranks == {0: 0.3, 1: 0.4, 2: 0.3, 3: 0.4}


def test_a_rank_that_runs_more_microbatches_is_not_shown_as_slow(tmp_path):
    own, many = [[8, [0.9, 0.3, 0.3]]], [[2, [3, 1, 1]]]
    line = {"time_s": 1.0, "generation": 1, "ranks": [0, 1, 2], "own": own, "microbatches": many}
    JsonLines(tmp_path / "nodes" / "a.jsonl").write(line)
    assert FolderView(tmp_path).look().ranks == pytest.approx(dict.fromkeys(range(3), 0.3))


def made(folder: Path, name: str, ended: bool = False) -> Path:
    run = folder / name
    for step in range(3):
        JsonLines(run / "metrics.jsonl").write({
            "step": step, "loss": 3.0, "tokens": 100, "tokens_per_s": 10.0, "mfu": 0.5, "step_time_s": 0.1,
            "memory_bytes": 1e6, "seconds": {"forward": 0.1, "step": 0.1},
        })  # fmt: skip
    (run / "run.toml").write_text(f'name = "{name}"\n[train]\nsteps = 3\n')
    if ended:
        (run / "report.json").write_text("{}")
    return run


def test_without_a_terminal_each_run_is_a_line(tmp_path, capsys):
    made(tmp_path, "first", ended=True)
    made(tmp_path, "second")
    assert terminal.main(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    (first,), (second,) = ([line for line in lines if line.startswith(name)] for name in ("first", "second"))
    assert first.startswith("first step     3/3  ended  loss 3.000") and second.startswith("second step     3/3  loss")


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        terminal.main(tmp_path)


def test_a_run_that_has_written_nothing_for_long_is_said_to_be_silent(tmp_path):
    run = made(tmp_path, "old")
    os.utime(run / "metrics.jsonl", (1, 1))
    assert terminal.seen(terminal.FolderView(run)).doing.startswith("silent for")


def test_a_run_without_a_report_that_has_ended_is_not_silent(tmp_path):
    run = made(tmp_path, "served")
    os.utime(run / "metrics.jsonl", (1, 1))
    JsonLines(run / "events/server-1.jsonl").write({"time_s": 2.0, "event": "finish", "exit_code": 0, "finished": True})
    assert terminal.seen(terminal.FolderView(run)).doing == "finished"


def test_keys_choose_the_run_and_the_terminal_is_as_it_was(tmp_path, monkeypatch):
    for name in ("first", "second"):
        made(tmp_path, name)
    main, end = pty.openpty()
    before = termios.tcgetattr(end)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    with open(end, "r+b", buffering=0, closefd=False) as raw:
        out = os.fdopen(os.dup(end), "w", encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", raw)
        monkeypatch.setattr(sys, "stdout", out)
        keys = iter(["", "\x1b[B", "", "q"])
        monkeypatch.setattr(terminal, "typed_key", lambda _: next(keys))
        assert terminal.main(tmp_path) == 0
    shown = ""
    while select.select([main], [], [], 0.5)[0]:  # a terminal gives out a part at a time
        shown += os.read(main, 1 << 16).decode(errors="replace")
    assert "first (1 of 2)" in shown and "second (2 of 2)" in shown
    assert termios.tcgetattr(end) == before


def test_keys_that_were_typed_at_once_are_read_one_by_one(monkeypatch):
    reader, writer = os.pipe()
    os.write(writer, b"\x1b[B\x1b[1;5Cqn\x1b")
    with os.fdopen(reader, "rb", buffering=0) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        assert [terminal.typed_key(0.0) for _ in range(6)] == ["\x1b[B", "\x1b[1;5C", "q", "n", "\x1b", ""]
    os.close(writer)


def test_ctrl_c_before_the_first_picture_ends_it(tmp_path, monkeypatch):
    def interrupted(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "seen", interrupted)
    terminal._show([made(tmp_path, "large")])


def test_one_line_of_several_runs_says_which(tmp_path, monkeypatch, capsys):
    runs = [tmp_path / "first", made(tmp_path, "second")]
    runs[0].mkdir()
    keys = iter(["n", "q"])
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(terminal, "typed_key", lambda _: next(keys))
    terminal._show(runs)
    shown = capsys.readouterr().out
    assert "first (1 of 2)" in shown and "second (2 of 2)" in shown
