"""`argosy config`: the resolved run file is a run file, the rest is for people and programs."""

import json

import pytest

from argosy.cli import main
from argosy.config.load import load
from argosy.plan.hardware.devices import find_device


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


def test_what_a_command_prints_has_a_schema(capsys):
    assert main(["config", "schema", "--of", "status"]) == 0
    assert {"state", "next", "loss"} <= json.loads(capsys.readouterr().out)["properties"].keys()


def test_schema_is_json(capsys):
    assert main(["config", "schema"]) == 0
    assert "optimizer" in json.loads(capsys.readouterr().out)["properties"]


SHEET = ["--bf16-tflops", "165.2", "--memory-gb", "24", "--memory-gb-s", "1008"]


def test_a_device_of_a_data_sheet_can_be_planned_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "device", "mine", *SHEET, "--link-gb-s", "32"]) == 0
    assert "wrote mine.toml; use it as --cluster 8xmine.toml; assumed: matmul_efficiency" in capsys.readouterr().out
    assert find_device("mine.toml").peak("bf16") == 165.2e12
    asked = ["plan", "--model", "qwen3-0.6b", "--seq-len", "2048", "--global-batch", "64", "--json", "--cluster"]
    assert main([*asked, "2xmine.toml"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["step_s"]["mid"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine", "--memory-gb", "24", "--memory-gb-s", "1008"], "no matmul rate is given"),
        (["mine", *SHEET, "--link-gb-s", "0"], "--link-gb-s 0.0: must be a finite number above 0"),
        (["h100", *SHEET], "h100: the catalogue has it already"),
        (["mine", *SHEET, "--out", "there.toml"], "there.toml exists already"),
        (["mine", *SHEET, "--out", "no/mine.toml"], "no/mine.toml: cannot be written"),
        (["mine", *SHEET, "--int8-tflops", "1"], "--int8-tflops"),
    ],
)
def test_a_data_sheet_that_makes_no_sense_leaves_no_file(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("mine")
    assert main(["config", "device", *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]
    assert (tmp_path / "there.toml").read_text() == "mine"


@pytest.mark.parametrize("argv", [["config", "shw"], ["config", "show", "no.toml"], ["config", "show", "--sed", "1"]])
def test_wrong_input_exits_with_2(argv, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith("argosy: ")


def test_each_action_has_a_help_of_its_own(capsys):
    texts = set()
    for action in ("show", "schema", "presets", "device"):
        with pytest.raises(SystemExit):
            main(["config", action, "--help"])
        texts.add(capsys.readouterr().out.split("\n\n")[1])
    assert len(texts) == 4


def test_a_run_s_folder_is_shown_by_its_run_file(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('name = "mine"')
    (tmp_path / "plan.toml").write_text("")
    assert main(["config", "show", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "mine"
