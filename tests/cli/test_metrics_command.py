"""`argosy metrics`, `runs --where` and `compare` print what a script can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy.cli import main
from run_folder import RunFolder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, name in enumerate(("good", "bad")):
        run = RunFolder(tmp_path / "runs" / name)
        for step in range(5):
            run.step(step, loss=3.0 + number)
    return tmp_path / "runs"


def test_metrics_are_csv_json_lines_or_parquet(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["metrics", str(runs / "good"), "--columns", "step,loss", "--every", "2"]
    assert main(words) == 0
    assert capsys.readouterr().out == "step,loss\n1,3.0\n3,3.0\n"
    lines = '{"step": 1.0, "loss": 3.0}\n{"step": 3.0, "loss": 3.0}\n'
    for json_words in (["--format", "json"], ["--json"], ["--json", "--format", "json"]):
        assert main([*words, *json_words]) == 0
        assert capsys.readouterr().out == lines
    path = runs / "out.parquet"
    assert main([*words, "--format", "parquet", "--out", str(path)]) == 0
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(path).to_pydict() == {"step": [1, 3], "loss": [3.0, 3.0]}
    assert main([*words, "--json", "--format", "csv", "--out", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(path) and path.read_text().startswith("step,loss\n1,3.0\n")
    assert main(["metrics", str(runs / "good"), "--json"]) == 0
    assert "loss" in json.loads(capsys.readouterr().out)["keys"]


@pytest.mark.parametrize(
    "words", [["--columns", "lss"], ["--columns", "loss", "--every", "0"], ["--columns", "loss", "--format", "parquet"]]
)
def test_what_cannot_be_is_refused(runs: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["metrics", str(runs / "good"), *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("argosy: --")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_file_that_cannot_be_written_is_named(runs: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    out = runs / "none" / "table"
    assert main(["metrics", str(runs / "good"), "--columns", "all", "--format", form, "--out", str(out)]) == 2
    assert f"argosy: --out {out}: cannot be written" in capsys.readouterr().err


def test_a_stranger_s_key_steers_no_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder(runs / "odd").step(0, user={"\x1b[2J": 1.0})
    assert main(["metrics", str(runs / "odd"), "--columns", "all"]) == 0
    assert r"user.\x1b[2J" in capsys.readouterr().out


def test_csv_is_not_printed_where_json_is_asked_for(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(runs / "good"), "--columns", "loss", "--json", "--format", "csv"]) == 2
    assert "--format csv: with --json, JSON is printed" in json.loads(capsys.readouterr().out)["error"]


def test_runs_are_chosen_and_ordered(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs), "--where", "loss < 3.5"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["good"]
    assert main(["runs", str(runs), "--sort=-loss", "--json"]) == 0
    assert [json.loads(row)["id"] for row in capsys.readouterr().out.splitlines()] == ["bad", "good"]
    assert main(["runs", str(runs), "--where", "exit()"]) == 2


def test_two_runs_are_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "good"), str(runs / "bad"), "--json"]) == 0
    curve = json.loads(capsys.readouterr().out)["curves"][0]
    assert (curve["of"], curve["a"][0], curve["b"][0]) == ("tokens", 3.0, 4.0)
    assert main(["compare", str(runs / "good"), str(runs / "nowhere")]) == 2
