"""A function of the caller's is told each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.launch.shown import Following


def add(path: Path, *steps: int, loss: float = 1.0) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": loss}) + "\n" for step in steps)


def steps(records: list[dict[str, Any]]) -> list[int]:
    return [record["step"] for record in records]


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
