"""The lines of a file, as they come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.launch.following import Following, NewLines


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


def test_the_last_lines_are_told_before_the_block_ends(tmp_path):
    told = []
    with Following(tmp_path, told.append, stop=lambda: None):
        add(tmp_path / "metrics.jsonl", 0, 1)
    assert steps(told) == [0, 1]


def test_an_error_of_the_caller_stops_the_run_and_is_raised(tmp_path):
    stopped = []

    def fail(record: dict[str, Any]) -> None:
        raise StopIteration("mine")

    with (
        pytest.raises(StopIteration, match="mine"),
        Following(tmp_path, fail, stop=lambda: stopped.append(1)),
    ):
        add(tmp_path / "metrics.jsonl", 0, 1)
    assert len(stopped) == 1
