""""""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.files import lock_or_holder
from argosy.watch.library import find_runs, run_folder
from argosy.watch.reader import RunReader, is_run
from run_folder import RunFolder
from run_folders import Made, Trouble, append


def opened(folder: Path) -> RunReader:
    return RunReader.read(folder)


def test_a_run_folder_is_read_whole(tmp_path: Path) -> None:
    reader = opened(Made(steps=120, ranks=4, per_node=2).write(tmp_path / "demo"))
    assert reader.problems == []
    assert len(reader.steps) == 120
    assert reader.run is not None and reader.run.name == "demo"
    assert reader.plan is not None and reader.plan.world_size == 4
    assert reader.prediction is not None and reader.prediction.step_s.mid == 0.38
    assert reader.report is not None and reader.report["energy"]["source"] == "nvml"
    assert list(reader.nodes) == ["node-0", "node-1"]
    assert [sample["step"] for sample in reader.samples] == [49, 99]
    assert {event["process"] for event in reader.events} >= {"coordinator", "launcher-node-1", "rank-3"}
    assert [event["time_s"] for event in reader.events] == sorted(event["time_s"] for event in reader.events)
    assert {"loss", "seconds.forward", "norms.layers.0.weight"} <= set(reader.keys())


def test_only_a_change_counts_as_one(tmp_path: Path) -> None:
    folder = Made(steps=20).write(tmp_path / "demo")
    reader = opened(folder)
    assert not reader.refresh()
    for path, line in {
        "events/rank-0.jsonl": {"time_s": 1.0, "event": "save", "step": 1},
        "events/new.jsonl": {"time_s": 2.0, "event": "fault"},
        "nodes/node-9.jsonl": {"time_s": 3.0, "ranks": [1]},
        "samples.jsonl": {"step": 1, "text": "x"},
    }.items():
        append(folder / path, line)
        assert reader.refresh(), path
        assert not reader.refresh(), path
    (folder / "report.json").unlink()
    assert reader.refresh()
    assert reader.report is None


def test_a_missing_part_is_empty(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    append(folder / "metrics.jsonl", {"step": 0, "loss": 1.0, "seconds": {"forward": 1.0}})
    reader = opened(folder)
    assert len(reader.steps) == 1
    assert (reader.run, reader.plan, reader.prediction, reader.report) == (None, None, None, None)
    assert (reader.events, reader.nodes, reader.samples, reader.problems) == ([], {}, [], [])


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "foreign"])
def test_a_folder_that_is_no_run_is_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    if kind == "file":
        folder.write_text("x")
    elif kind != "missing":
        folder.mkdir()
    if kind == "foreign":
        (folder / "photo.jpg").write_bytes(b"\xff\xd8")
    assert not is_run(folder)
    with pytest.raises(UserError, match=r"not a run: it .*Name a run's folder"):
        RunReader(folder)


@pytest.mark.parametrize("inside", ["sites/oslo", "demo"])
def test_a_folder_of_runs_is_refused_with_one_of_them(inside: str, tmp_path: Path) -> None:
    made = Made(steps=2).write(tmp_path / "two" / inside)
    with pytest.raises(UserError, match=f"Name a run's folder, such as {made}."):
        RunReader(tmp_path / "two")


def test_what_is_damaged_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = Made(steps=20).write(tmp_path / "demo")
    (folder / "run.toml").write_text("nonsense = ")
    (folder / "plan.toml").write_text("pp = 'three'")
    (folder / "report.json").write_text("[" * 100_000)
    append(folder / "metrics.jsonl", b"\xff\xfe\n")
    reader = opened(folder)
    assert len(reader.steps) == 20
    assert (reader.run, reader.plan, reader.report) == (None, None, None)
    assert len(reader.problems) == 4, reader.problems
    for name in ("run.toml", "plan.toml", "report.json", "metrics.jsonl"):
        assert any(problem.startswith(name) for problem in reader.problems), name


def test_nothing_outside_of_the_folder_is_read_through_a_link(tmp_path: Path) -> None:
    folder = Made(steps=20).write(tmp_path / "demo")
    secret = tmp_path / "secret"
    append(secret / "all.jsonl", {"step": 77, "loss": 1.0, "text": "secret", "event": "secret", "time_s": 1.0})
    for name in ("metrics.jsonl", "samples.jsonl", "events/rank-0.jsonl", "nodes/node-0.jsonl"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret / "all.jsonl")
    reader = opened(folder)
    assert len(reader.steps) == 0
    assert reader.samples == []
    assert "node-0" not in reader.nodes
    assert "secret" not in {event["event"] for event in reader.events}
    shutil.rmtree(folder / "events")
    (folder / "events").symlink_to(secret)
    assert "secret" not in {event["event"] for event in opened(folder).events}


def test_nothing_is_read_where_a_run_file_says_that_weights_are(tmp_path: Path) -> None:
    folder = Made(steps=3).write(tmp_path / "demo")
    others = Made(steps=3).write(tmp_path / "others")
    (folder / "run.toml").write_text(f'model.weights = "{others}"\ntrain.steps = 3\n')
    (others / "run.toml").write_text("model.width = 4096\n")
    reader = RunReader.read(folder)
    assert reader.run is not None and reader.run.model.width != 4096
    (folder / "run.toml").write_text(f'model.weights = "{tmp_path}"\ntrain.steps = 3\n')
    assert reader.refresh() and reader.problems == []  # a store, of a URL, would be asked as well


def test_a_pipe_in_a_file_s_place_holds_nothing_up(tmp_path: Path) -> None:
    folder = Made(steps=20).write(tmp_path / "demo")
    (folder / "samples.jsonl").unlink()
    os.mkfifo(folder / "samples.jsonl")
    reader = opened(folder)
    assert len(reader.steps) == 20
    assert "samples.jsonl" in reader.problems[0]


@pytest.mark.parametrize(
    ("made", "state", "why"),
    [
        (Made(steps=20), "finished", ""),
        (Made(steps=20, total_steps=40, is_finished=False), "silent", "no sign of life"),
        (Made(steps=20, trouble=Trouble(crash=True)), "failed", "ValueError"),
    ],
)
def test_the_state_of_a_run(made: Made, state: str, why: str, tmp_path: Path) -> None:
    reader = opened(made.write(tmp_path / "demo"))
    assert reader.state == state
    assert why in reader.why


@pytest.mark.parametrize(("steps", "seconds"), [(20, 15), (0, 5)])
def test_a_run_that_began_a_moment_ago_is_training(steps: int, seconds: int, tmp_path: Path) -> None:
    made = Made(steps=steps, start_s=time.time() - seconds, is_finished=False)
    assert opened(made.write(tmp_path / "demo")).state == "training"


def test_a_run_that_has_said_nothing_yet_is_as_old_as_its_run_file(tmp_path: Path) -> None:
    folder = Made(steps=0, is_finished=False).write(tmp_path / "demo")
    for name in ("events", "nodes"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    assert opened(folder).state == "training"
    os.utime(folder / "run.toml", (time.time() - 7200,) * 2)
    assert (opened(folder).state, opened(folder).why[:26]) == ("silent", "no sign of life for 2 h, a")


HOLD = """
import sys, time
from argosy.files import lock_or_holder
file = open(sys.argv[1], "a+")
lock_or_holder(file)
print(flush=True)
time.sleep(600)
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the run as one that trains it does."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder / ".lock")], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        yield holder
        holder.kill()


@pytest.mark.parametrize(
    ("events", "state", "why"),
    [
        ([], "dead", "its processes are gone, and no event says why; the last that it printed: Segmentation fault"),
        (["signal"], "stopped", "SIGTERM stopped it before its state was saved; the last that it printed: Segment"),
    ],
)
def test_a_run_whose_processes_are_gone_is_dead_at_once(
    tmp_path: Path, events: list[str], state: str, why: str
) -> None:
    made = Made(steps=20, total_steps=40, start_s=time.time() - 15, is_finished=False)
    folder = made.write(tmp_path / "demo")
    append(folder / "logs" / "worker-1.log", b"a line\nSegmentation fault\n\n")
    with held(folder) as holder:
        assert opened(folder).state == "training"
        for kind in events:
            append(folder / "events" / "launcher.jsonl", {"time_s": time.time(), "event": kind, "number": 15})
        holder.kill()
        holder.wait()
        assert (opened(folder).state, opened(folder).why[: len(why)]) == (state, why)
    (folder / ".lock").write_text("17\nanother machine\n")
    assert opened(folder).state == "training", "what holds it elsewhere cannot be seen from here"


def test_who_looks_whether_a_run_is_held_keeps_no_other_from_starting_it(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("a+") as looked, (tmp_path / ".lock").open("a+") as begun:
        fcntl.flock(looked, fcntl.LOCK_SH)
        letting_go = threading.Timer(0.03, looked.close)
        letting_go.start()
        assert lock_or_holder(begun) is None
        letting_go.join()


def test_a_run_that_a_signal_stopped_is_stopped_until_it_goes_on(tmp_path: Path) -> None:
    folder = Made(steps=20, is_finished=False).write(tmp_path / "demo")
    now = time.time()
    append(folder / "events" / "rank-0.jsonl", {"time_s": now - 60, "event": "end", "finished": False})
    append(folder / "events" / "coordinator.jsonl", {"time_s": now - 59, "event": "finish", "exit_code": 0})
    reader = opened(folder)
    assert reader.state == "stopped"
    append(folder / "events" / "rank-0.jsonl", {"time_s": now - 2, "event": "start", "step": 20})
    assert reader.refresh()
    assert reader.state == "training"


def test_node_lines_are_those_about_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    reader = opened(Made(steps=500).write(tmp_path / "demo"))
    records, all_there = reader.node_records("node-1", 100, 200)
    assert all_there
    covered = sorted(step for record in records for step in range(record["steps"][0], record["steps"][1] + 1))
    assert covered[0] <= 100 and covered[-1] >= 200 and set(range(100, 201)) <= set(covered)
    assert len(records) < 15


def test_memory_is_given_back_and_the_numbers_stay(tmp_path: Path) -> None:
    reader = opened(Made(steps=100).write(tmp_path / "demo"))
    before = reader.steps["seconds.forward"].copy()
    reader.release()
    assert (reader.steps["seconds.forward"] == before).all()


def test_a_folder_that_must_not_be_written_is_read(tmp_path: Path) -> None:
    folder = Made(steps=30).write(tmp_path / "demo")
    before = _listing(folder)
    opened(folder).steps["seconds.forward"]
    assert _listing(folder) == before


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_a_line_of_a_newer_version_does_no_harm(tmp_path: Path) -> None:
    folder = Made(steps=5).write(tmp_path / "demo")
    append(folder / "events" / "rank-0.jsonl", b'{"event": "odd", "time_s": "late"}\n', b'{"time_s": 5}\n', b"7\n")
    append(folder / "nodes" / "node-0.jsonl", b'{"time_s": null}\n', b"[]\n", json.dumps({"ranks": 3}).encode() + b"\n")
    reader = opened(folder)
    assert "odd" not in {event["event"] for event in reader.events}
    assert reader.nodes["node-0"].last["steps"] == [0, 4]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("b", "a", "team/deep/c", "a/checkpoints/inner", ".hidden/d"):
        Made(steps=2).write(tmp_path / "runs" / name)
    (tmp_path / "runs" / "foreign").mkdir()
    (tmp_path / "runs" / "foreign" / "photo.jpg").write_bytes(b"\xff")
    Made(steps=2).write(tmp_path / "outside")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "runs" / "circle").symlink_to(tmp_path / "runs")
    return tmp_path / "runs"


def test_runs_are_found_under_a_folder(root: Path) -> None:
    assert list(find_runs(root)) == ["a", "b", "team/deep/c"]


def test_a_run_that_is_named_itself_is_found(root: Path) -> None:
    assert find_runs(root / "a") == {"a": root / "a"}
    assert run_folder(root / "a", "a") == root / "a"


def test_a_folder_without_runs_has_none(root: Path) -> None:
    assert find_runs(root / "foreign") == {}
    assert find_runs(root / "missing") == {}


def test_an_id_names_a_run(root: Path) -> None:
    assert run_folder(root, "team/deep/c") == root / "team" / "deep" / "c"


@pytest.mark.parametrize(
    "run_id",
    [
        "..", "../outside", "a/../../outside", "a/..", "./a", "", "/etc", "/", "//etc/passwd", "../../etc/passwd",
        "..\\outside", "a//", "a/metrics.jsonl", "a\0", "x" * 5000, "link", ".hidden/d", "foreign", "missing", ".",
    ],
)  # fmt: skip
def test_no_id_leads_out_of_the_folder(root: Path, run_id: str) -> None:
    with pytest.raises(UserError, match="no run"):
        run_folder(root, run_id)


def test_an_evaluation_of_steps_that_were_lost_is_forgotten(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.step(0, 1)
    run.evaluation(1, 3.0)
    reader = RunReader.read(tmp_path)
    assert reader.last_evaluation["validation_loss"] == 3.0
    run.lose_from(1)
    reader.refresh()
    assert reader.last_evaluation == {}
