"""Commands that start processes print documents that keep their schemas; the others: tests/cli/test_documents.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from argosy.cli.documents import DOCUMENTS, schema_of
from commands import Folder
from waiting import PATIENT_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def ask(folder: Folder) -> Callable[..., list[Any]]:
    """Give a command in a process of its own; its documents, each checked against the schema."""

    def give(document: str, *words: object, code: int = 0) -> list[Any]:
        found = folder.documents(*words, code=code, here=False)
        for line in found:
            Draft202012Validator(schema_of(document)).validate(line)
        assert len(found) == 1 or DOCUMENTS[document].is_many
        return found

    return give


def test_a_run_from_its_probe_to_its_adapter(folder: Folder, ask: Callable[..., list[Any]]) -> None:
    folder.write_run(steps=8)
    ask("probe", "probe", "--run", "run.toml", "--processes", 2, "--minutes", 0.02)
    assert ask("train", "train", "run.toml")[0]["steps"] == 8
    assert ask("replay", "replay", "runs/tiny", "--step", 7)[0]["equal"]
    ask("plan-learn", "plan", "--learn", "runs/tiny")
    ask("parity", "parity", "run.toml", "--plan", "tp=2", "--steps", 2)
    with_adapter = ("--model.weights", "runs/tiny", "--lora.rank", 2, "--run-dir", "runs/lora", "--train.steps", 2)
    ask("train", "train", "run.toml", *with_adapter)
    (listed,) = ask("checkpoint-list-adapters", "checkpoint", "list", "runs")
    assert listed["step"] == 2
    (said,) = ask("dry-run", "checkpoint", "merge", "runs/lora", "--out", "runs/merged", "--dry-run")
    assert "runs/merged" in said["would"][0] and not (folder.path / "runs/merged").exists()
    (merged,) = ask("checkpoint-merge", "checkpoint", "merge", "runs/lora", "--out", "runs/merged")
    assert merged["out"] == "runs/merged" and (folder.path / "runs/merged/run.toml").exists()


def test_a_launched_run_until_it_is_stopped(folder: Folder, ask: Callable[..., list[Any]]) -> None:
    folder.write_run(steps=100_000)
    (job,) = ask("launch", "launch", "run.toml")
    assert job["engine"] == "local" and job["folder"] == str(folder.path / "runs/tiny")
    metrics = folder.path / "runs/tiny/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 3)
    (node,) = ask("stacks", "stacks", "runs/tiny", "--wait-s", 60)
    assert len(node["workers"]) == 2
    ask("plan-run", "plan", "runs/tiny", "--cluster", "8xh100")
    assert ask("status", "status", "runs/tiny")[0]["state"] == "training"
    assert "runs/tiny" in ask("dry-run", "stop", "runs/tiny", "--dry-run")[0]["would"][0]
    assert ask("stop", "stop", "runs/tiny")[0]["told"]
    wait_until(lambda: ask("runs", "runs")[0]["state"] == "stopped")
    assert not ask("stop", "stop", "runs/tiny")[0]["told"]
    assert ask("logs", "logs", "runs/tiny")


def test_a_sweep_and_a_disturbed_run(folder: Folder, ask: Callable[..., list[Any]]) -> None:
    folder.write_run(steps=6, processes=1)
    (folder.path / "sweep.toml").write_text(
        'run = "run.toml"\nmethod = "grid"\n[parameters]\n"optimizer.lr" = [1e-3, 1e-2]\n'
    )
    assert len(ask("sweep", "sweep", "sweep.toml")[0]["trials"]) == 2
    assert ask("chaos", "chaos", "run.toml", "--every-s", 100)[0]["same_weights"]


def test_the_address_of_the_page_is_a_document(folder: Folder) -> None:
    (folder.path / "runs").mkdir()
    process = folder.start("watch", "--json", "--mcp-http")
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    Draft202012Validator(schema_of("watch")).validate(said)
    assert said["mcp"] == f"{said['url']}mcp"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 0 and not out, err
