from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from argosy.observe import line_follower
from argosy.watch import metrics_table
from argosy.watch.metrics_table import MetricsTable
from run_folders import Made, append


@pytest.fixture(params=["all keys", "by groups", "without msgspec"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways in which a file is read: all of it, group by group as a long one, and that without the fast parser."""
    if request.param != "all keys":
        monkeypatch.setattr(metrics_table, "TABLE_READ_WHOLE_BYTES", 0)
        monkeypatch.setattr(line_follower, "LINE_READ_BYTES", 20_000)
    if request.param == "without msgspec":
        monkeypatch.setattr(metrics_table, "msgspec", None)
    return str(request.param)


@pytest.fixture
def made() -> Made:
    return Made(steps=300, norms_every=50, user=("accuracy",))


@pytest.fixture
def path(tmp_path: Path, made: Made) -> Path:
    append(tmp_path / "metrics.jsonl", *made.metric_lines())
    return tmp_path / "metrics.jsonl"


def read(path: Path) -> MetricsTable:
    table = MetricsTable(path)
    table.refresh()
    return table


def check_equal(table: MetricsTable, path: Path) -> None:
    """Compare with the simplest reading there is."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    np.testing.assert_array_equal(table.steps["step"], list(steps))
    for key in ("loss", "lr", "seconds.forward", "communication.dp_replicate.network.1", "user.accuracy"):
        np.testing.assert_array_equal(table.steps[key], [_at(line, key) for line in steps.values()], err_msg=key)
    evaluations = [line for line in lines if "validation_loss" in line]
    np.testing.assert_array_equal(table.evaluations["step"], [line["step"] for line in evaluations])
    np.testing.assert_array_equal(table.evaluations["bits_per_byte"], [line["bits_per_byte"] for line in evaluations])
    due = [line for line in steps.values() if "norms" in line]
    np.testing.assert_array_equal(table.norms["step"], [line["step"] for line in due])
    np.testing.assert_array_equal(
        table.norms["layers.1.gradient"], [line["norms"]["layers.1"]["gradient"] for line in due]
    )


def _at(line: dict, key: str) -> float:
    value = line
    for name in key.split("."):
        value = value[int(name)] if isinstance(value, list) else value.get(name, {})
    return np.nan if value == {} or value is None else float(value)


def test_all_numbers_are_those_of_the_file(reading: str, path: Path) -> None:
    table = read(path)
    check_equal(table, path)
    assert {"loss", "seconds.forward", "user.accuracy", "communication.world.network.0"} <= set(table.keys())
    assert table.bad_lines == 0


def test_the_accuracy_of_a_reward_model_is_of_its_evaluation(reading: str, path: Path) -> None:
    append(path, {"step": 299, "validation_loss": 0.5, "validation_accuracy": 0.75})
    assert read(path).evaluations["validation_accuracy"][-1] == 0.75


def test_what_is_added_is_read_line_by_line(reading: str, path: Path, made: Made) -> None:
    table = read(path)
    assert not table.refresh()
    for step in range(300, 340):
        append(path, {**made.metric_line(step), "user": {"new": step}})
        assert table.refresh()
        assert table.steps["step"][-1] == step
    check_equal(table, path)
    assert table.steps["user.new"][-1] == 339
    assert table.last_line["step"] == 339


def test_a_line_that_is_being_written_counts_once_it_is_whole(reading: str, path: Path, made: Made) -> None:
    table = read(path)
    line = json.dumps(made.metric_line(300)).encode() + b"\n"
    append(path, line[:40])
    assert not table.refresh()
    append(path, line[40:])
    assert table.refresh()
    check_equal(table, path)


def test_a_line_that_a_kill_cut_off_costs_only_itself(reading: str, path: Path, made: Made) -> None:
    append(path, '{"step": 300, "text": "é'.encode()[:-1] + b"\n", made.metric_line(301), b"\x00\x00\n")
    table = read(path)
    assert table.steps["step"][-2:].tolist() == [299, 301]
    assert table.bad_lines == 2


def test_steps_that_a_recovery_forgot_are_gone(reading: str, path: Path, made: Made) -> None:
    table = read(path)
    table.steps["seconds.forward"]
    _cut(path, from_step=200)
    assert table.refresh()
    assert table.steps["step"][-1] == 199
    assert table.evaluations["step"][-1] == 199
    assert table.norms["step"][-1] == 150
    check_equal(table, path)


def test_a_cut_is_seen_although_the_file_is_longer_again(reading: str, path: Path, made: Made) -> None:
    table = read(path)
    size = path.stat().st_size
    _cut(path, from_step=200)
    append(path, *({**made.metric_line(step), "loss": 9.0} for step in range(200, 330)))
    assert path.stat().st_size > size
    assert table.refresh()
    check_equal(table, path)
    assert table.steps["loss"][250] == 9.0


def test_a_file_that_is_replaced_is_read_anew(reading: str, path: Path) -> None:
    table = read(path)
    table.steps["seconds.forward"]
    other = path.with_name("other")
    append(other, *Made(steps=40, step_s=0.7, user=("accuracy",)).metric_lines())
    other.replace(path)
    assert table.refresh()
    check_equal(table, path)


def test_while_a_file_is_rotated_what_was_read_stays(reading: str, path: Path) -> None:
    table = read(path)
    path.rename(path.with_name("away"))
    assert not table.refresh()
    assert table.is_missing
    assert len(table.steps) == 300
    assert len(table.steps["seconds.forward"]) == 300
    path.with_name("away").rename(path)
    assert not table.refresh()
    assert not table.is_missing
    check_equal(table, path)


def test_an_empty_file_has_no_steps_and_no_file_neither(reading: str, tmp_path: Path) -> None:
    table = read(tmp_path / "metrics.jsonl")
    assert table.is_missing
    append(tmp_path / "metrics.jsonl", b"")
    table.refresh()
    assert not table.is_missing
    assert len(table.steps) == len(table.evaluations) == 0
    assert table.steps["loss"].tolist() == []


def test_a_step_whose_loss_is_not_finite_is_a_step(reading: str, path: Path, made: Made) -> None:
    append(path, {**made.metric_line(300), "loss": None}, made.metric_line(301), b'{"step": 302, "loss": NaN}\n')
    table = read(path)
    assert table.steps["step"][-3:].tolist() == [300, 301, 302]
    assert np.isnan(table.steps["loss"][[300, 302]]).all()


def test_foreign_lines_are_counted_and_passed_over(reading: str, path: Path) -> None:
    append(path, {"hello": 1}, {"step": "three", "loss": 1}, b"[]\n", b"{}\n", {"step": None, "loss": 1})
    table = read(path)
    assert len(table.steps) == 300
    assert table.bad_lines == 5


def test_memory_that_was_given_back_is_read_again(reading: str, path: Path) -> None:
    table = read(path)
    before = table.steps["seconds.forward"].copy()
    table.drop_all_but_first()
    assert "seconds.forward" not in table.steps
    np.testing.assert_array_equal(table.steps["seconds.forward"], before)
    check_equal(table, path)


def test_a_file_without_lines_is_passed_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_follower, "LONGEST_RECORD_BYTES", 10_000)
    monkeypatch.setattr(line_follower, "LINE_READ_BYTES", 4_000)
    path.write_bytes(b"x" * 100_000)
    table = read(path)
    assert len(table.steps) == 0
    assert table.bad_lines > 0


def _cut(path: Path, from_step: int) -> None:
    """As a recovery does it."""
    with path.open("rb+") as file:
        end = 0
        while (line := file.readline()) and json.loads(line)["step"] < from_step:
            end += len(line)
        file.truncate(end)
