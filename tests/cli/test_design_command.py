"""`argosy design`, as a user runs it: text, JSON, every point as a line, charts, and input that makes no sense."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.plan.design.conftest import SERVE, TRAIN

from argosy import cli

SPACE = f"""
name = "mine"
[device]
base = "h100"
node = ["N7", "N5"]
memory = ["HBM3", "HBM4"]
stacks = [5]
{(TRAIN.replace("= 64", "= 2") + SERVE).replace("llama3-8b", "llama3.2-1b")}
[speedup]
before = "a100"
after = "h100"
"""


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(SPACE)
    return path


def test_it_prints_json_and_writes_points_and_charts(space: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plots, points = space.parent / "plots", space.parent / "points.csv"
    assert cli.main(["design", str(space), "--json", "--csv", str(points), "--plots", str(plots)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points"] == 4 and found["seconds"] > 0 and set(found["fronts"]) == {"training", "serving"}
    assert {one["work"] for one in found["matmuls"]} == {"training", "prefill", "decode"}
    assert {one["binds"] for one in found["matmuls"]} == {"compute", "memory"}
    rows = list(csv.DictReader(points.open()))
    assert len(rows) == 4 and {len(row["decode_binds"]) for row in rows} == {7}
    names = {path.name for path in plots.iterdir()}
    assert {"mine-training-node.svg", "mine-serving-memory-binds.svg", "mine-serving-speedup.svg"} <= names
    for path in plots.iterdir():
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_it_says_what_binds_and_that_nobody_has_run_it(space: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["design", str(space), "--top", "1"]) == 0
    said = capsys.readouterr().out
    for words in ("mine: 4 devices from H100-SXM on", "training along node", "No run has checked these figures"):
        assert words in said


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"HBM3", "HBM4"', '"HBM9"', r"mine.toml:6: device.memory: 'HBM9' is not known"),
        ('"llama3.2-1b"', '"llama9"', r"mine\.toml:\d+: train\.model = \"llama9\": no model preset is called"),
        ("llama3.2-1b", "llama3.1-405b", r"mine\.toml:\d+: train\.devices = 2: llama3\.1-405b fits on no device"),
        ("seq_len = 8192", "seq_len = 900000", r"mine\.toml:\d+: train\.seq_len 900000 is more than"),
    ],
)
def test_what_makes_no_sense_is_one_message(
    space: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    space.write_text(space.read_text().replace(old, new, 1))
    assert cli.main(["design", str(space)]) == 2
    import re

    said = capsys.readouterr().err
    assert re.search(message, said) and "Traceback" not in said
