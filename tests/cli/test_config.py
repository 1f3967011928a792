"""`argosy config`: the resolved run file is a run file, the rest is for people and programs."""

import json

import pytest

from argosy.cli import main
from argosy.config.load import load


def test_show_prints_a_run_file_that_comes_to_the_same(tmp_path, capsys):
    assert main(["config", "show", "demo", "--train.steps", "5"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "run.toml") == load("demo", {"train.steps": 5})


def test_show_and_presets_speak_json(capsys):
    assert main(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "demo"
    assert main(["config", "presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"]["qwen3-0.6b"] == 596_049_920


def test_presets_names_every_preset(capsys):
    assert main(["config", "presets"]) == 0
    out = capsys.readouterr().out
    assert "llama3.1-405b    405.85B" in out
    assert "demo" in out


def test_schema_is_json(capsys):
    assert main(["config", "schema"]) == 0
    assert "optimizer" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize("argv", [["config", "shw"], ["config", "show", "no.toml"], ["config", "show", "--sed", "1"]])
def test_wrong_input_exits_with_2(argv, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith("argosy: ")
