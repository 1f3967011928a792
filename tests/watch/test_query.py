"""Conditions on runs say what they say and are never run as code; steps become a table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from argosy.errors import UserError
from argosy.watch.overview import KEYS, line
from argosy.watch.query import condition_of, ordered, table_of_steps
from argosy.watch.reader import RunReader
from run_folder import RunFolder

ROW = {"loss": 2.5, "validation_loss": 2.75, "tokens": 2e9, "state": "finished", "model": "llama3-8b", "mfu": None}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("loss < 3 and tokens > 1e9", True),
        ("loss < 2 or val < 3", True),
        ("not loss < 2", True),
        ("2 < loss < 2.6", True),
        ("val - loss > 0.3", False),
        ("-loss < -2.4 and tokens / 1e9 == 2", True),
        ('state == "finished" and "llama" in model', True),
        ('"qwen" not in model', True),
        ("mfu < 1", False),
        ("mfu >= 1", False),
        ("not mfu < 1", True),
        ("state < 3", False),
        ("loss / 0 > 1", False),
    ],
)
def test_a_condition_holds_or_not(text: str, holds: bool) -> None:
    assert condition_of(text, ROW)(ROW) is holds


def test_no_comparison_with_a_loss_that_is_not_finite_holds() -> None:
    row = ROW | {"loss": math.nan}
    assert not condition_of("loss < 3", ROW)(row) and not condition_of("loss >= 3", ROW)(row)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('id')", "model.upper() == 'X'", "loss[0] < 3", "(lambda: 1)()", "loss ** 9 < 3",
        "lss < 3", "loss <", "", "loss < 3; tokens > 1", "[x for x in model]", "loss < 3\x00", "1" * 2000,
        "not " * 200 + "loss",
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused_and_nothing_is_run(text: str) -> None:
    try:
        holds = condition_of(text, ROW)
    except UserError as problem:
        assert "--where" in str(problem)
    else:
        assert text.startswith("not ") and holds(ROW) in (True, False)


def test_runs_without_the_key_come_last_in_any_order() -> None:
    rows: list[dict[str, Any]] = [{"loss": 3.0}, {"loss": None}, {"loss": 1.0}]
    assert [row["loss"] for row in ordered(rows, "loss", ROW)] == [1.0, 3.0, None]
    assert [row["loss"] for row in ordered(rows, "-loss", ROW)] == [3.0, 1.0, None]
    with pytest.raises(UserError, match="did you mean loss"):
        ordered(rows, "los", ROW)


@pytest.fixture
def reader(tmp_path: Path) -> RunReader:
    run = RunFolder(tmp_path / "tiny")
    run.step(*range(10))
    run.step(10, loss=math.nan)
    run.evaluation(4, 3.5)
    run.evaluation(9, 3.25)
    return RunReader.read(run.path)


def test_the_keys_of_a_run_are_those_of_its_line(reader: RunReader) -> None:
    assert tuple(line("tiny", reader)) == KEYS


def test_steps_become_columns(reader: RunReader) -> None:
    assert table_of_steps(reader, ["step", "loss"], 2, 9, 3) == {"step": [3, 6, 9], "loss": [3.0, 6.0, 9.0]}
    assert table_of_steps(reader, ["loss"], 9) == {"loss": [9.0, None]}
    assert table_of_steps(reader, ["step", "val"]) == {"step": [4, 9], "validation_loss": [3.5, 3.25]}
    both = table_of_steps(reader, ["loss", "val"], 3, 5)
    assert both == {"loss": [3.0, 4.0, 5.0], "validation_loss": [None, 3.5, None]}
    assert set(table_of_steps(reader, ["all"])) >= {"step", "loss", "validation_loss", "seconds.forward"}
    with pytest.raises(UserError, match="did you mean loss"):
        table_of_steps(reader, ["lss"])
