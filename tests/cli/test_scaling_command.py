"""`argosy scaling`, as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from argosy import cli

LAW = 1.69, 406.4, 410.7, 0.34, 0.28


@pytest.fixture
def table(tmp_path: Path) -> str:
    E, A, B, alpha, beta = LAW
    rows = [(n, d, E + A / n**alpha + B / d**beta) for n in (1e8, 1e9, 1e10) for d in (1e9, 1e10, 1e11)]
    path = tmp_path / "results.csv"
    path.write_text("parameters,tokens,loss\n" + "".join(f"{n},{d},{loss}\n" for n, d, loss in rows))
    return str(path)


def test_json_has_law_optimum_and_prediction(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--budget", "1e21", "--parameters", "7e9", "--tokens", "140e9", "--draws", "5", "--json"]
    assert cli.main(["scaling", table, *asked]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["results"] == 9
    assert [round(e["value"], 2) for e in said["coefficients"].values()] == pytest.approx(LAW, rel=1e-3)
    assert said["compute_optimal"]["flops"] == 1e21
    assert said["compute_optimal"]["parameters"]["value"] * said["compute_optimal"]["tokens"]["value"] * 6 == (
        pytest.approx(1e21)
    )
    assert said["prediction"]["loss"]["value"] == pytest.approx(2.188, abs=0.01)


def test_without_scipy_the_extra_is_named(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert cli.main(["scaling", table]) == 2
    assert "pip install 'argosy[scaling]'" in capsys.readouterr().err


def test_words_name_the_budget(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scaling", table, "--budget", "1e21", "--draws", "5"]) == 0
    said = capsys.readouterr().out
    assert "compute-optimal for 1e+21 FLOPs" in said and "tokens_per_parameter" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no results"),
        (["none.csv"], "none.csv"),
        (["TABLE", "--parameters", "7e9"], "give both"),
        (["TABLE", "--budget", "-1"], "--budget -1: must be above 0"),
        (["TABLE", "--predict", "a.toml", "--parameters", "1", "--tokens", "1"], "give one of them"),
        (["TABLE", "--bugdet", "1e21"], "--budget"),
    ],
)
def test_wrong_input_is_refused(table: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert cli.main(["scaling", *(table if word == "TABLE" else word for word in words)]) == 2
    assert said in capsys.readouterr().err
