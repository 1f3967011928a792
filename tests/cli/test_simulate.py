"""`argosy simulate`: its words, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy.cli import main

TINY = ["--model.vocab-size", "300", "--model.layers", "1", "--train.global-batch", "2", "--data.seq-len", "32"]


def test_a_model_and_a_plan_are_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert main(["simulate", *TINY, "--plan", "dp_shard=2", "--rank", "1", "--json", "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rank"] == 1
    assert sum(found["memory"]["at_peak"].values()) == found["memory"]["peak_bytes"]
    assert {row["axis"] for row in found["traffic"]} == {"shard"}
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--plan", "dp_shard=2", "--rank", "2"], "--rank 2: there are ranks 0 to 1"),
        (["--plan", "dp_shard=2", "--world-size", "4"], "--world-size 4"),
        (["--plan", "dp_shrad=2"], "did you mean dp_shard"),
        (["--model", "llama3.1-504b", "--plan", "tp=2"], "did you mean"),
        (["--plan", "dp_shard=2", "--cluster", "2xh1000"], "h100"),
        (["--plan", "dp_shard=16", "--cluster", "8xh100"], "has 8 devices, and there are 16 ranks"),
        (["--plan", "dp_shard=2", "--device", "cuda", "--trace", "x.json"], "--trace"),
        ([*TINY, "--plan", "dp_shard=2", "--trace", "/no/x.json"], "--trace /no/x.json: cannot be written"),
        (
            [*TINY, "--plan", "auto", "--launch.processes", "0"],
            'plan = "auto" is for any number of ranks. Say for how many, e.g. --world-size 8',
        ),
    ],
)
def test_what_makes_no_sense_is_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_gpu_that_is_not_there_tells_where_the_host_waits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *TINY, "--plan", "dp_shard=2", "--device", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["host_syncs_a_step"] == 2 and found["misplaced"] == found["races"] == []
    places = {row["where"].partition(":")[0] for row in found["host_syncs"] if row["part"] == "step"}
    assert places == {"training/step.py", "observe/clock.py"}
