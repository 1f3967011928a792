"""`benchmarks/planner/score.py`, as one runs it: figures for rows it has never seen, and clear words for bad files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCORE = ROOT / "benchmarks/planner/score.py"
PUBLISHED = ROOT / "benchmarks/planner/published.csv"


def rows(many: int = 6) -> list[dict[str, str]]:
    """Rows of the H100 as if an unknown publisher had measured them: nothing is fitted anew."""
    with PUBLISHED.open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row["id"].startswith("titan")]
    return [{**row, "source": "Somebody (2027) torchtitan"} for row in found[:many]]


def written(path: Path, table: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    return path


def score(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCORE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refused(path: Path) -> str:
    """Return what the program, run in this process, says of a file that it refuses."""
    err = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(err):
        patch.syspath_prepend(str(SCORE.parent))
        assert import_module("score").main([str(path)]) == 2
    return err.getvalue()


@pytest.mark.slow
def test_rows_of_a_new_publisher_are_scored(tmp_path):
    unknown = {**rows(1)[0], "id": "no-layers", "layers": ""}
    done = score(written(tmp_path / "new.csv", [*rows(), unknown]), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["all"]["dense_time"]["n"] == 3
    assert result["all"]["memory"]["n"] == 3
    assert set(result["all"]["dense_time"]) == {
        "n", "median_abs_pct_error", "mean_abs_pct_error", "bias_pct", "kendall_tau", "regret_pct", "coverage_90",
    }  # fmt: skip
    assert result["all"]["dense_time"]["median_abs_pct_error"] < 25
    told = result["strangers"]
    assert next(iter(result)) == "strangers" and list(told["by_lineage"]) == ["Somebody"]
    assert told["all"]["dense_time"]["n"] == 3
    assert told["all"]["dense_time"]["median_over_publishers"] == told["all"]["dense_time"]["median_abs_pct_error"]
    assert list(result["by_source"]) == ["Somebody (2027) torchtitan"]
    assert result["skipped"] == [{"id": "no-layers", "why": "layers is not known"}]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value": "fast"}, "line 3 (id titan-002): value = 'fast' is not a number"),
        ({"value": "-1"}, "line 3 (id titan-002): value = '-1' must be a number above 0"),
        ({"metric": "speed"}, "line 3 (id titan-002): metric = 'speed' is none of"),
        ({"gpu": "H1000"}, "line 3 (id titan-002): no device is called 'H1000'"),
        ({"precision": "fp12"}, "precision = 'fp12' is none of"),
    ],
)
def test_a_bad_row_is_named(tmp_path, changes, says):
    table = rows(3)
    table[1] |= changes
    said = refused(written(tmp_path / "bad.csv", table))
    assert says in said and len(said.splitlines()) == 1


def test_a_file_without_the_columns_is_refused(tmp_path):
    said = refused(written(tmp_path / "short.csv", [{"id": "1", "value": "2"}]))
    assert "line 1: no column source, model" in said
