"""The lines of a file, as they come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.observe.new_lines import DENSE, NewLines


def add(path: Path, *steps: int, loss: float = 1.0) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": loss}) + "\n" for step in steps)


def steps(records: list[dict[str, Any]]) -> list[int]:
    return [record["step"] for record in records]


def test_only_what_is_new_and_complete_is_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert NewLines(path).take() == []
    add(path, 0, 1)
    lines = NewLines(path)
    add(path, 2)
    with path.open("a") as file:
        file.write('{"step": 3')
    assert steps(lines.take()) == [2]
    with path.open("a") as file:
        file.write("}\nbroken\n")
    assert steps(lines.take()) == [3]
    assert lines.take() == []


@pytest.mark.parametrize("again", [(1,), (1, 2), (1, 2, 3, 4)], ids=["shorter", "as long", "longer"])
def test_steps_that_were_forgotten_and_run_again_are_told_again(tmp_path, again):
    path = tmp_path / "metrics.jsonl"
    add(path, 0)
    lines = NewLines(path)
    add(path, 1, 2)
    assert steps(lines.take()) == [1, 2]
    path.write_text("")
    add(path, 0)
    add(path, *again, loss=2.0)
    assert steps(lines.take()) == list(again)
    add(path, 9)
    assert steps(lines.take()) == [9]


def test_a_reader_that_was_restarted_goes_on_where_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    add(path, *range(1000))
    lines = NewLines(path, [])
    assert steps(lines.take(most=900)) == list(range(900))
    again = NewLines(path, json.loads(json.dumps(lines.marks())))
    assert steps(again.take()) == list(range(900, 1000))
    assert not again.was_cut


@pytest.mark.parametrize("left", [995, 700, 3, 0])
def test_a_reader_that_was_restarted_sees_that_lines_were_lost_meanwhile(tmp_path, left):
    path = tmp_path / "metrics.jsonl"
    add(path, *range(1000))
    lines = NewLines(path, [])
    lines.take()
    marks = lines.marks()
    assert len(marks) <= DENSE * 6
    path.write_text("")
    add(path, *range(left))
    add(path, *range(left, 1002), loss=2.0)
    again = NewLines(path, marks)
    told = again.take()
    assert again.was_cut
    assert steps(told)[-1] == 1001
    assert steps(told)[0] <= left
    assert left - steps(told)[0] <= max(1, (1000 - left) * 2)  # some that did not change may be told again
    assert (again.kept or {"step": -1})["step"] == steps(told)[0] - 1


def test_a_file_that_is_gone_has_lost_all_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    add(path, 0)
    lines = NewLines(path, [])
    lines.take()
    path.unlink()
    assert lines.take() == []
    assert lines.was_cut
    assert lines.kept is None
